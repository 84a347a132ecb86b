"""An outcome as Chrome-trace JSON, which Perfetto and chrome://tracing open: lanes as slices, memory as counters.

Times are microseconds, as the format asks; counters are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdall.types import Outcome, Span

Event = dict[str, Any]


def chrome_trace(outcome: Outcome, name: str, *, pid: int = 1) -> dict[str, Any]:
    """The outcome as one process called `name`; use a different `pid` for each outcome in one file."""
    events = [_metadata("process_name", pid, 0, name=name), _metadata("process_sort_index", pid, 0, sort_index=pid)]
    for tid, (lane, spans) in enumerate(_tracks(outcome.lanes), start=1):
        events += [_metadata("thread_name", pid, tid, name=lane), _metadata("thread_sort_index", pid, tid, sort_index=tid)]
        events += [_slice(span, pid, tid) for span in spans]
    events += _counters(outcome, pid)
    about = {"source": outcome.source, "seconds": outcome.seconds, "peak": dict(outcome.peak), "peak_where": outcome.peak_where}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _tracks(spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Lanes in order of appearance. Slices of one track must not overlap, so overlapping ones get a second track."""
    lanes: dict[str, list[list[Span]]] = {}
    for span in sorted(spans, key=lambda s: s.start):
        tracks = lanes.setdefault(span.lane, [])
        free = next((track for track in tracks if track[-1].end <= span.start), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return [(lane if n == 0 else f"{lane} ({n + 1})", t) for lane, tracks in lanes.items() for n, t in enumerate(tracks)]


def _slice(span: Span, pid: int, tid: int) -> Event:
    start, end = _microseconds(span.start), _microseconds(span.end)
    took = max(0.0, round(end - start, 3))
    return {"ph": "X", "name": span.name, "cat": span.lane, "ts": start, "dur": took, "pid": pid, "tid": tid}


def _counters(outcome: Outcome, pid: int) -> list[Event]:
    """Two counters, since a viewer stacks the series of one: the total must not be stacked on its parts."""
    # A series keeps its last value, so every event names every kind.
    seen = list(dict.fromkeys(k for m in outcome.timeline for k in m.kinds))
    events = []
    for moment in outcome.timeline:
        common = {"ph": "C", "cat": "memory", "ts": _microseconds(moment.at), "pid": pid, "tid": 0}
        events.append({**common, "name": "memory", "args": {"total": moment.total}})
        if seen:
            kinds = {kind.value: moment.kinds.get(kind, 0) for kind in seen}
            events.append({**common, "name": "memory by kind", "args": kinds})
    return events


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": tid, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
