"""Steps -> Outcome: times, and bytes per tier.

Memory follows program order, as in allocators; time follows the clocks of computation and links. The two are separate: a Copy
takes memory when it is issued, whenever it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdall.cost.launching import COPY, PLACED, by_program, starts, starts_of
from holdall.cost.link import copy_seconds
from holdall.simulator.allocators import Allocator
from holdall.simulator.clock import COMPUTE, HOST, Clock, lane_of
from holdall.types import Copy, Drop, Hardware, Holder, Kind, Moment, Op, Outcome, Run, Schedule, Span, Step, Wait

_MOMENTS = 1200  # most points of a timeline

_Moment = tuple[tuple[int, float], int, int, tuple[int, ...]]  # ((task, seconds into it), step, bytes, bytes by kind)


def replay(
    steps: Sequence[Step], schedule: Schedule, hardware: Hardware, *, allocator: Allocator | None = None, full: bool = False
) -> Outcome:
    """Simulate the steps. `full`: with timeline, lanes and the tensors at the peak. `allocator`: also compute
    reserved bytes."""
    home = schedule.home
    info = {**schedule.trace.tensors, **schedule.added}
    clock = Clock(hardware)
    live: dict[str, int] = {home: 0}
    peak: dict[str, int] = {}
    kinds = dict.fromkeys(Kind, 0)
    traffic: dict[str, int] = {}
    busy: dict[int, int] = {}  # tensor -> the task that ends its copy or host update
    moments: list[_Moment] = []
    worst: tuple[int, int, tuple[int, ...]] = (-1, -1, ())  # (bytes, step, bytes by kind)
    spans: list[tuple[int, float, float, str, str]] = []  # (task, start, duration, lane, name)
    recompute = work = 0.0
    launching = hardware.overhead if hardware.device == "cuda" else 0.0  # on a CPU the launch is part of an op's seconds
    plain = starts(schedule.trace) if launching else []
    programs = by_program(schedule) if launching else frozenset()
    if schedule.placed and launching:  # parameters are clipped and stepped one by one before the host can begin an update
        clock.launch(schedule.placed * PLACED * launching)
        clock.beside(HOST, schedule.placed * PLACED * launching, name="clipping")

    def enter(x: int, tier: str) -> None:
        t = info[x]
        live[tier] = live.get(tier, 0) + t.nbytes
        if tier == home:
            kinds[t.kind] += t.nbytes
            if allocator is not None:
                allocator.alloc(x, t.nbytes)

    for x, t in info.items():
        if t.born < 0:
            enter(x, schedule.start.get(x, home))
    peak.update(live)
    for number, step in enumerate(steps):
        if isinstance(step, Run):
            if step.stream != COMPUTE and hardware.overlap:
                task = clock.beside(step.stream, step.seconds, after=_busy(busy, (*step.reads, *step.mutates)), name=step.name)
                busy.update(dict.fromkeys(step.mutates, task))
                continue
            if step.stream != COMPUTE:  # the same processors, in order
                at = clock.compute(step.seconds)
                work += step.seconds
                if full:
                    _span(spans, at, step.seconds, step.stream, step.name)
                continue
            for x in step.writes:
                enter(x, home)
            if step.workspace and allocator is not None:
                allocator.alloc(-1, step.workspace)
                allocator.free(-1)
            now = live[home] + step.workspace
            peak[home] = max(peak[home], now)
            if launching:
                clock.launch(starts_of(step, plain, programs) * launching)
            at = clock.compute(step.seconds)
            work += step.seconds
            if step.again:
                recompute += step.seconds
            if full:
                if now > worst[0]:
                    worst = (now, number, tuple(kinds.values()))
                moments.append((at, number, now, tuple(kinds.values())))
                lane = "recompute" if step.again else "compute"
                _span(spans, at, step.seconds, lane, _where(step, schedule.trace.ops))
        elif isinstance(step, Copy):
            total = step.nbytes + sum(info[x].nbytes for x in step.tensors)
            if step.lands:
                for x in step.tensors:
                    enter(x, step.dst)
            peak[step.dst] = max(peak.get(step.dst, 0), live.get(step.dst, 0))
            traffic[f"{step.src}->{step.dst}"] = traffic.get(f"{step.src}->{step.dst}", 0) + total
            if hardware.overlap:
                clock.launch(COPY * launching)
                after = _busy(busy, (*step.tensors, *step.uses))
                task = clock.copy(step.src, step.dst, total, after=after, lane=step.lane, name=step.name)
                busy.update(dict.fromkeys((*step.tensors, *step.uses), task))
            else:  # the processor that computes also copies: honest about it
                seconds = copy_seconds(total, hardware, step.src, step.dst)
                at = clock.compute(seconds)
                if full:
                    _span(spans, at, seconds, lane_of(hardware, step.src, step.dst), step.name)
        elif isinstance(step, Wait):
            clock.wait(_busy(busy, step.tensors))
        elif isinstance(step, Drop):
            t = info[step.tensor]
            live[step.tier] -= t.nbytes
            if step.tier == home:
                kinds[t.kind] -= t.nbytes
                if allocator is not None:
                    allocator.free(step.tensor)
    seconds = clock.run()
    outcome = Outcome(
        source="simulated",
        seconds=seconds,
        peak=peak,
        recompute_seconds=recompute,
        stall_seconds=max(0.0, seconds - work),
        reserved=allocator.peak_reserved if allocator is not None else None,
        traffic=traffic,
    )
    if not full:
        return outcome
    return _with_details(outcome, steps, schedule, _lanes(clock, spans), _dated(moments, clock), worst)


def _busy(busy: dict[int, int], tensors: Iterable[int]) -> list[int]:
    """The running tasks that move or make these tensors, each once."""
    return list(dict.fromkeys(busy[x] for x in tensors if x in busy))


def _dated(moments: list[_Moment], clock: Clock) -> list[tuple[float, int, int, tuple[int, ...]]]:
    return [(clock.tasks[task].start + into, number, total, kinds) for (task, into), number, total, kinds in moments]


def _lanes(clock: Clock, spans: list[tuple[int, float, float, str, str]]) -> list[Span]:
    """All spans by lane; computation under the names of its ops."""
    found = []
    for task, into, length, lane, name in spans:
        begun = clock.tasks[task].start + into
        found.append(Span(lane=lane, name=name, start=begun, end=begun + length))
    idle_from = 0.0
    for done in clock.tasks:
        if done.lane != COMPUTE:
            found.append(Span(lane=done.lane, name=done.name, start=done.start, end=done.end))
            continue
        if done.start > idle_from:
            found.append(Span(lane="waiting", name="waiting", start=idle_from, end=done.start))
        idle_from = done.end
    return sorted(found, key=lambda span: span.start)


def _where(step: Step, ops: Sequence[Op]) -> str:
    if isinstance(step, Run) and step.op >= 0:
        site = ops[step.op].site
        again = "recompute for " if step.again else ""
        return f"{again}{site.phase.value} of `{site.module or 'model'}` ({site.op})"
    return step.name if isinstance(step, (Run, Copy)) else ""


def _span(spans: list[tuple[int, float, float, str, str]], at: tuple[int, float], seconds: float, lane: str, name: str) -> None:
    """Add time to a lane; adjacent spans with the same name are merged."""
    task, into = at
    if spans:
        last_task, last_into, length, last_lane, last_name = spans[-1]
        if (last_task, last_lane, last_name) == (task, lane, name) and abs(last_into + length - into) < 1e-12:
            spans[-1] = (task, last_into, length + seconds, lane, name)
            return
    spans.append((task, into, seconds, lane, name))


def _with_details(
    outcome: Outcome,
    steps: Sequence[Step],
    schedule: Schedule,
    lanes: Sequence[Span],
    moments: list[tuple[float, int, int, tuple[int, ...]]],
    worst: tuple[int, int, tuple[int, ...]],
) -> Outcome:
    ops = schedule.trace.ops
    names = list(Kind)
    return replace(
        outcome,
        peak_where=_where(steps[worst[1]], ops) if worst[1] >= 0 else "",
        peak_kinds={k: v for k, v in zip(names, worst[2], strict=False) if v},
        at_peak=_holders(steps, schedule, worst[1]),
        timeline=tuple(
            Moment(
                at=at,
                where=_where(steps[number], ops),
                total=total,
                kinds={k: v for k, v in zip(names, values, strict=True) if v},
            )
            for at, number, total, values in _thin(moments)
        ),
        lanes=tuple(lanes),
    )


def _holders(steps: Sequence[Step], schedule: Schedule, until: int) -> tuple[Holder, ...]:
    """The largest tensors present after step `until` has allocated its results."""
    info = {**schedule.trace.tensors, **schedule.added}
    present = {x for x, t in info.items() if t.born < 0 and schedule.start.get(x, schedule.home) == schedule.home}
    for step in steps[: until + 1]:
        if isinstance(step, Run):
            present.update(step.writes)
        elif isinstance(step, Copy) and step.lands and step.dst == schedule.home:
            present.update(step.tensors)
        elif isinstance(step, Drop) and step.tier == schedule.home:
            present.discard(step.tensor)
    largest = sorted(present, key=lambda x: -info[x].nbytes)[:12]
    return tuple(Holder(name=info[x].name, kind=info[x].kind, nbytes=info[x].nbytes) for x in largest)


def _thin(moments: list[tuple[float, int, int, tuple[int, ...]]]) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """At most `_MOMENTS` points, keeping the maximum of each interval."""
    if len(moments) <= _MOMENTS:
        return moments
    width = -(-len(moments) // _MOMENTS)
    return [max(moments[i : i + width], key=lambda m: m[2]) for i in range(0, len(moments), width)]
