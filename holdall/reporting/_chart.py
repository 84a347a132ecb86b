"""The timeline of the page: memory by kind over one step, and below it the activity of each stream.

The drawing is SVG that stretches with the window; its labels are
HTML laid over it by percentages, so that they keep their size on a narrow screen.

    peak label
    memory by kind, budget, measured total      one time axis
    compute / copy out / copy in / waiting      for all of it

A measured step that took much longer or shorter than predicted is drawn over the length of the predicted one, and the legend
says so: the chart compares heights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from holdall.reporting._page import legend_item, marked, percent, voice
from holdall.reporting.text import KIND_LABELS
from holdall.types import Kind, Moment, Outcome, Phase, Span
from holdall.units import GiB, KiB, MiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from holdall.reporting.report import Report

LIMIT = 1500  # points per line and rectangles per lane: more make the page heavy without showing more
LANES = ("compute", "recompute", "copy out", "copy in", "waiting")  # first, in this order; others follow as they appear

_WIDE, _HIGH = 1000, 300  # units of the drawing, which is stretched to the window
_APART = 0.2  # beyond this relative difference in length, two steps on one axis cannot be compared
_REST = "rest"  # bytes of a total without a kind

Series = dict[str, list[int]]  # colour class -> bytes at each moment, bottom of the stack first


@dataclass(frozen=True)
class _Chart:
    """Everything drawn over one time axis."""

    moments: list[Moment]  # drawn as a stack, by kind
    until: float  # end of the stack's outcome
    line: list[Moment]  # drawn on top: the measured total; empty: not measured, or already the stack
    line_until: float
    line_seconds: float  # real duration of the line if it is stretched to the stack's length; otherwise 0
    lanes: dict[str, list[Span]]
    series: Series

    @cached_property
    def end(self) -> float:
        return max([self.until, self.line_until, *(s.end for spans in self.lanes.values() for s in spans)]) or 1.0

    @cached_property
    def highest(self) -> int:
        stacked = map(sum, zip(*self.series.values(), strict=True))
        return max(1, *stacked, *(m.total for m in (*self.moments, *self.line)))


def draw_timeline(report: Report) -> str:
    """The section with the chart and its tooltip data; says so if no timeline was recorded."""
    outcomes = [o for o in (report.predicted, report.measured) if o]
    shown = next((o for o in outcomes if o.timeline), None)
    chart = _chart(
        shown, report.measured if report.measured is not shown else None, next((o for o in outcomes if o.lanes), None)
    )
    if not chart.moments and not chart.lanes:
        return '<section><h2>Memory over the step</h2><p class="soft">No timeline was recorded.</p></section>'
    memory = _memory(report, chart) + _phases(chart) if chart.moments else ""
    lanes = "".join(_lane(name, spans, chart.end) for name, spans in chart.lanes.items())
    by = f", {voice(shown)}" if shown else ""
    return (
        f'<section><h2>Memory over the step<span class="soft">{by}</span></h2>{_legend(chart)}'
        f'<div id="chart" class="chart" tabindex="0" role="group" aria-label="memory over time; arrow keys move the cursor">'
        f'{memory}{lanes}{_time_axis(chart.end)}<div class="cursor" hidden></div>'
        f'<div class="tip" role="status" hidden></div></div>'
        f'<script id="data" type="application/json">{_tooltip_data(chart)}</script></section>'
    )


def _chart(shown: Outcome | None, seen: Outcome | None, busy: Outcome | None) -> _Chart:
    moments = thin_moments(shown.timeline) if shown else []
    line = thin_moments(seen.timeline) if seen else []
    until, line_until = _until(shown, moments), _until(seen, line)
    apart = bool(until and line_until) and abs(line_until - until) > _APART * until
    if apart:
        line = [replace(m, at=m.at * until / line_until) for m in line]
    return _Chart(
        moments=moments,
        until=until,
        line=line,
        line_until=until if apart else line_until,
        line_seconds=line_until if apart else 0.0,
        lanes=_lanes(busy) if busy else {},
        series=_series(moments),
    )


def _until(outcome: Outcome | None, moments: Sequence[Moment]) -> float:
    return max(outcome.seconds, moments[-1].at) if outcome and moments else 0.0


def thin_moments(moments: Sequence[Moment], limit: int = LIMIT) -> list[Moment]:
    """At most `limit` moments in order of time; the maximum and minimum of each interval stay, so the peak does."""
    usable = sorted((m for m in moments if math.isfinite(m.at)), key=lambda m: m.at)
    if len(usable) <= limit:
        return usable
    stretch = math.ceil(len(usable) / (limit // 2))
    kept: list[Moment] = []
    for start in range(0, len(usable), stretch):
        part = range(start, min(start + stretch, len(usable)))
        ends = {max(part, key=lambda i: usable[i].total), min(part, key=lambda i: usable[i].total)}
        kept += [usable[i] for i in sorted(ends)]
    return kept


def thin_spans(spans: Sequence[Span], limit: int = LIMIT) -> list[Span]:
    """At most `limit` spans of one lane; neighbours are merged if there are more."""
    stretch = math.ceil(len(spans) / limit)
    if stretch <= 1:
        return list(spans)
    joined = []
    for start in range(0, len(spans), stretch):
        part = spans[start : start + stretch]
        name = f"{part[0].name} and {len(part) - 1} more" if len(part) > 1 else part[0].name
        joined.append(Span(lane=part[0].lane, name=name, start=part[0].start, end=max(s.end for s in part)))
    return joined


def _lanes(outcome: Outcome) -> dict[str, list[Span]]:
    spans = sorted((s for s in outcome.lanes if math.isfinite(s.start) and math.isfinite(s.end)), key=lambda s: s.start)
    found = dict.fromkeys(s.lane for s in spans)
    order = [*(name for name in LANES if name in found), *(name for name in found if name not in LANES)]
    return {name: [s for s in spans if s.lane == name] for name in order}


def _series(moments: Sequence[Moment]) -> Series:
    """Bytes by kind at each moment, bottom of the stack first; absent kinds are left out."""
    series = {f"k-{kind.value}": [m.kinds.get(kind, 0) for m in moments] for kind in KIND_LABELS}
    series[f"k-{_REST}"] = [max(0, m.total - sum(m.kinds.values())) for m in moments]
    return {style: values for style, values in series.items() if any(values)}


def _series_label(style: str) -> str:
    kind = style.removeprefix("k-")
    return "not told apart" if kind == _REST else KIND_LABELS[Kind(kind)]


def _legend(chart: _Chart) -> str:
    items = [legend_item(style, _series_label(style)) for style in chart.series]
    if chart.line:
        length = format_seconds(chart.line_seconds)
        over = f" ({length}, drawn over the length of the predicted step)" if chart.line_seconds else ""
        items.append(legend_item("line", f"measured total{over}"))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _memory(report: Report, chart: _Chart) -> str:
    """The stack and its overlay: gridlines, the budget, the peak and its label."""
    budget = report.plan.budget.get(report.home)
    near = budget is not None and budget <= 1.5 * chart.highest  # a far larger budget would flatten the chart
    top = 1.1 * max(chart.highest, budget if near and budget else 0)
    unit, name = next(((u, n) for u, n in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if top >= u), (1, "B"))
    heights = [(tick, percent(tick * unit / top)) for tick in _ticks(top / unit, 6)]
    rules = "".join(f'<i class="rule" style="bottom:{height}"></i>' for _, height in heights)
    marks = "".join(f'<span style="bottom:{height}">{tick:g}</span>' for tick, height in heights)
    peak = max(chart.moments, key=lambda m: m.total)
    across = peak.at / chart.end
    side, margin = ("left", across) if across < 0.5 else ("right", 1 - across)  # the label extends to the wider side
    limit = ""
    if budget is not None:  # labelled on the side opposite the peak
        place = (
            f'class="budget off-{side}" style="bottom:{percent(budget / top)}"' if near else f'class="budget far off-{side}"'
        )
        limit = f"<div {place}><span>budget {format_bytes(budget)}{'' if near else ', above this chart'}</span></div>"
    spot = f'style="left:{percent(across)};bottom:{percent(peak.total / top)}"'
    return (
        f'<div class="row"><div class="gutter unit">{name}</div><div class="flags"><p class="flag {side}" '
        f'style="margin-{side}:{percent(margin)}"><b>peak {format_bytes(peak.total)}</b> {marked(peak.where)}</p></div></div>'
        f'<div class="row"><div class="gutter ticks">{marks}</div><div class="field memory">{rules}'
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" role="img" aria-label="bytes by kind">'
        f'{_paths(chart, top)}</svg>{limit}<i class="stem {side}" {spot}></i><i class="dot" {spot}></i></div></div>'
    )


def _paths(chart: _Chart, top: float) -> str:
    """Each area reaches down to zero and is covered by those below it in the stack: half the points of true bands."""
    times, start = [m.at for m in chart.moments], _WIDE * chart.moments[0].at / chart.end
    tops = accumulate(chart.series.values(), lambda below, on: [a + b for a, b in zip(below, on, strict=True)])
    paths = []
    for style, values in zip(chart.series, tops, strict=True):
        edge = _edge(zip(times, values, strict=True), chart.until, chart.end, top)
        paths.append(f'<path class="area {style}" d="{edge}V{_HIGH}H{start:.1f}Z"/>')
    line = _edge(((m.at, m.total) for m in chart.line), chart.line_until, chart.end, top)
    return "".join(reversed(paths)) + (f'<path class="measured" d="{line}"/>' if chart.line else "")


def _edge(points: Iterable[tuple[float, float]], until: float, end: float, top: float) -> str:
    """A stepped line: memory is constant between moments. `until`: end of the last value."""
    path: list[str] = []
    here = ""
    for at, value in points:
        x, y = f"{_WIDE * at / end:.1f}", f"{_HIGH * (1 - value / top):.1f}"
        if y != here:  # a constant value needs no point
            path.append(f"H{x}V{y}" if path else f"M{x} {y}")
            here = y
    return f"{''.join(path)}H{_WIDE * until / end:.1f}"


def _phases(chart: _Chart) -> str:
    """A band that marks the beginning of backward and of the optimizer's step, if op names show them ("backward of ...")."""
    starts: dict[str, float] = {}
    for before, moment in pairwise([chart.moments[0], *chart.moments]):  # an op begins when the previous one ends
        for phase in Phase:
            if phase.value not in starts and moment.where.startswith(phase.value):
                starts[phase.value] = before.at
    if len(starts) < 2:
        return ""
    bounds = pairwise([*(at / chart.end for at in starts.values()), chart.until / chart.end])
    drawn = "".join(
        f'<span class="end" style="left:{percent(left)}">{phase}</span>'  # no room to its right
        if left > 0.92
        else f'<span style="left:{percent(left)};width:{percent(right - left)}">{phase}</span>'
        for phase, (left, right) in zip(starts, bounds, strict=True)
    )
    return f'<div class="row phases"><div class="gutter"></div><div class="field">{drawn}</div></div>'


def _time_axis(end: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if end >= 10 * s), (1e-6, "us"))
    ticks = _ticks(end / scale, 8)
    marks = "".join(f'<span style="left:{percent(t * scale / end)}">{t:g}</span>' for t in ticks if t * scale <= 0.97 * end)
    return f'<div class="row axis"><div class="gutter unit">{unit}</div><div class="times">{marks}</div></div>'


def _ticks(top: float, count: int) -> list[float]:
    """About `count` round numbers from zero to `top`."""
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough), 10 * power)
    return [round(i * step, 10) for i in range(int(top / step) + 1)]


def _lane(name: str, spans: Sequence[Span], end: float) -> str:
    """Rectangles in two alternating shades, to separate adjacent ones."""
    busy = _busy(spans)
    shades = ["", ""]
    for i, span in enumerate(thin_spans(spans)):
        left, width = _WIDE * span.start / end, max(0.3, _WIDE * (span.end - span.start) / end)
        shades[i % 2] += f"M{left:.1f} 0h{width:.1f}v10h-{width:.1f}z"
    drawn = "".join(f'<path class="shade{i}" d="{d}"/>' for i, d in enumerate(shades) if d)
    style = name.replace(" ", "-") if name in LANES else "other"
    return (
        f'<div class="row lane l-{style}"><div class="gutter" title="{escape(name)}">{escape(name)}'
        f'<small>{format_seconds(busy)}</small></div><div class="field"><svg viewBox="0 0 {_WIDE} 10" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(name)}">{drawn}</svg></div></div>'
    )


def _busy(spans: Sequence[Span]) -> float:
    """Seconds with at least one running span: copies of one lane may overlap. `spans` are sorted by start."""
    total = until = 0.0
    for span in spans:
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def _tooltip_data(chart: _Chart) -> str:
    """The script's data as JSON, with angle brackets escaped, so that a name cannot close the script element."""
    data = {
        "end": chart.end,
        "until": chart.until,
        "at": [m.at for m in chart.moments],
        "where": [m.where for m in chart.moments],
        "total": [m.total for m in chart.moments],
        "kinds": [{"style": k, "label": _series_label(k), "bytes": values} for k, values in chart.series.items()],
        "seen": {"at": [m.at for m in chart.line], "total": [m.total for m in chart.line]},
        "lanes": [
            {"name": name, "spans": [[s.start, s.end, s.name] for s in thin_spans(spans)]}
            for name, spans in chart.lanes.items()
        ],
    }
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
