"""Steps -> Outcome: when everything happens, and how many bytes lie where.

Memory follows the order of the program, as allocators do; time follows the clocks of computation and of the links. The two are
kept apart: a Copy takes its space when it is issued, whenever it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdall.cost.link import Links, copy_seconds
from holdall.simulator.allocators import Allocator
from holdall.types import Copy, Drop, Hardware, Holder, Kind, Moment, Op, Outcome, Run, Schedule, Span, Step, Wait

_MOMENTS = 1200  # points of a timeline worth drawing


@dataclass
class _Clock:
    """Computation's clock and what was spent on it."""

    now: float = 0.0
    recompute: float = 0.0
    stall: float = 0.0
    lanes: list[Span] = field(default_factory=list)


def replay(
    steps: Sequence[Step], schedule: Schedule, hardware: Hardware, *, allocator: Allocator | None = None, full: bool = False
) -> Outcome:
    """`full`: with timeline, lanes and who sits at the peak. `allocator`: also what it reserves."""
    home = schedule.home
    info = {**schedule.trace.tensors, **schedule.added}
    ops = schedule.trace.ops
    clock, links = _Clock(), Links(hardware)
    live: dict[str, int] = {home: 0}
    peak: dict[str, int] = {}
    kinds = dict.fromkeys(Kind, 0)
    present: dict[int, None] = {}
    traffic: dict[str, int] = {}
    flying: dict[int, tuple[int, str, str]] = {}
    moments: list[tuple[float, int, int, tuple[int, ...]]] = []
    worst: tuple[int, int, tuple[int, ...]] = (-1, -1, ())  # bytes, step, kinds

    def enter(x: int, tier: str) -> None:
        t = info[x]
        live[tier] = live.get(tier, 0) + t.nbytes
        if tier == home:
            kinds[t.kind] += t.nbytes
            present[x] = None
            if allocator is not None:
                allocator.alloc(x, t.nbytes)

    for x, t in schedule.trace.tensors.items():
        if t.born < 0:
            enter(x, home)
    peak[home] = live[home]
    for number, step in enumerate(steps):
        if isinstance(step, Run):
            for x in step.writes:
                enter(x, home)
            if step.workspace and allocator is not None:
                allocator.alloc(-1, step.workspace)
                allocator.free(-1)
            now = live[home] + step.workspace
            peak[home] = max(peak[home], now)
            if full:
                if now > worst[0]:
                    worst = (now, number, tuple(kinds.values()))
                moments.append((clock.now, number, now, tuple(kinds.values())))
                _span(clock, "recompute" if step.again else "compute", _where(step, ops), step.seconds)
            clock.now += step.seconds
            if step.again:
                clock.recompute += step.seconds
        elif isinstance(step, Copy):
            total = sum(info[x].nbytes for x in step.tensors)
            for x in step.tensors:
                enter(x, step.dst)
            peak[step.dst] = max(peak.get(step.dst, 0), live[step.dst])
            far, direction = (step.dst, "out") if step.src == home else (step.src, "in")
            traffic[f"{step.src}->{step.dst}"] = traffic.get(f"{step.src}->{step.dst}", 0) + total
            if hardware.overlap:
                ticket = links.start(clock.now, far, direction, total)
                for x in step.tensors:
                    flying[x] = (ticket, f"copy {direction}", step.name)
            else:  # the processor that computes also copies: honest about it
                seconds = copy_seconds(total, hardware.tier(far), hardware, direction)
                if full:
                    _span(clock, f"copy {direction}", step.name, seconds)
                clock.now += seconds
                clock.stall += seconds
        elif isinstance(step, Wait):
            before = clock.now
            for x in step.tensors:
                if x not in flying:
                    continue
                ticket, lane, name = flying.pop(x)
                start, done = links.span(ticket)
                clock.now = max(clock.now, done)
                span = Span(lane=lane, name=name, start=start, end=done)
                if full and (not clock.lanes or clock.lanes[-1] != span):
                    clock.lanes.append(span)
            clock.stall += clock.now - before
            if full and clock.now > before:
                clock.lanes.append(Span(lane="waiting", name="waiting for copies", start=before, end=clock.now))
        elif isinstance(step, Drop):
            t = info[step.tensor]
            live[step.tier] -= t.nbytes
            if step.tier == home:
                kinds[t.kind] -= t.nbytes
                present.pop(step.tensor, None)
                if allocator is not None:
                    allocator.free(step.tensor)
    outcome = Outcome(
        source="simulated",
        seconds=clock.now,
        peak=peak,
        recompute_seconds=clock.recompute,
        stall_seconds=clock.stall,
        reserved=allocator.peak_reserved if allocator is not None else None,
        traffic=traffic,
    )
    return _with_details(outcome, steps, schedule, clock, moments, worst) if full else outcome


def _where(step: Step, ops: Sequence[Op]) -> str:
    if isinstance(step, Run) and step.op >= 0:
        site = ops[step.op].site
        again = "recompute for " if step.again else ""
        return f"{again}{site.phase.value} of `{site.module or 'model'}` ({site.op})"
    return step.name if isinstance(step, (Run, Copy)) else ""


def _span(clock: _Clock, lane: str, name: str, seconds: float) -> None:
    """Add time to a lane; neighbours of the same name become one span."""
    if clock.lanes:
        last = clock.lanes[-1]
        if last.lane == lane and last.name == name and abs(last.end - clock.now) < 1e-12:
            clock.lanes[-1] = Span(lane=lane, name=name, start=last.start, end=clock.now + seconds)
            return
    clock.lanes.append(Span(lane=lane, name=name, start=clock.now, end=clock.now + seconds))


def _with_details(
    outcome: Outcome,
    steps: Sequence[Step],
    schedule: Schedule,
    clock: _Clock,
    moments: list[tuple[float, int, int, tuple[int, ...]]],
    worst: tuple[int, int, tuple[int, ...]],
) -> Outcome:
    from dataclasses import replace

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
        lanes=tuple(clock.lanes),
    )


def _holders(steps: Sequence[Step], schedule: Schedule, until: int) -> tuple[Holder, ...]:
    """The largest tensors present when step `until` has allocated its results."""
    info = {**schedule.trace.tensors, **schedule.added}
    present = {x for x, t in schedule.trace.tensors.items() if t.born < 0}
    for step in steps[: until + 1]:
        if isinstance(step, Run):
            present.update(step.writes)
        elif isinstance(step, Copy) and step.dst == schedule.home:
            present.update(step.tensors)
        elif isinstance(step, Drop) and step.tier == schedule.home:
            present.discard(step.tensor)
    largest = sorted(present, key=lambda x: -info[x].nbytes)[:12]
    return tuple(Holder(name=info[x].name, kind=info[x].kind, nbytes=info[x].nbytes) for x in largest)


def _thin(moments: list[tuple[float, int, int, tuple[int, ...]]]) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """At most `_MOMENTS` points, the highest of each stretch, so that no peak is lost."""
    if len(moments) <= _MOMENTS:
        return moments
    width = -(-len(moments) // _MOMENTS)
    return [max(moments[i : i + width], key=lambda m: m[2]) for i in range(0, len(moments), width)]
