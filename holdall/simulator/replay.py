"""Steps -> Outcome: times, and bytes per tier.

Memory follows program order, as in allocators; time follows the clocks of computation and links. The two are separate: a Copy
takes memory when it is issued, whenever it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdall.cost.launching import PLACED, by_program, launching, starts, starts_of, starts_of_copy
from holdall.cost.link import copy_seconds
from holdall.simulator.allocators import Allocator
from holdall.simulator.clock import COMPUTE, HOST, Clock, lane_of
from holdall.types import Collect, Copy, Drop, Hardware, Holder, Kind, Moment, Op, Outcome, Run, Schedule, Span, Step, Wait

_MOMENTS = 1200  # most points of a timeline

_Moment = tuple[tuple[int, float], int, int, tuple[int, ...]]  # ((task, seconds into it), step, bytes, bytes by kind)


def replay(
    steps: Sequence[Step], schedule: Schedule, hardware: Hardware, *, allocator: Allocator | None = None, full: bool = False
) -> Outcome:
    """Simulate the steps. `full`: with timeline, lanes and the tensors at the peak. `allocator`: also compute
    reserved bytes."""
    memory = _Memory(schedule, allocator)
    times = _Times(schedule, hardware)
    details = _Details(schedule.trace.ops) if full else None
    for number, step in enumerate(steps):
        if isinstance(step, Run):
            if step.stream != COMPUTE:
                at = times.beside(step)
                if details is not None and at is not None:
                    details.spend(at, step.seconds, step.stream, step.name)
                continue
            now = memory.run(step)
            at = times.run(step)
            if details is not None:
                details.run(step, number, at, now, tuple(memory.kinds.values()))
        elif isinstance(step, Drop):
            memory.drop(step)
        elif isinstance(step, Copy):
            at = times.copy(step, memory.copy(step))
            if details is not None and at is not None:
                seconds = copy_seconds(memory.bytes_of(step), hardware, step.src, step.dst)
                details.spend(at, seconds, lane_of(hardware, step.src, step.dst), step.name)
        elif isinstance(step, Collect):
            memory.traffic[step.link] = memory.traffic.get(step.link, 0) + step.nbytes
            at = times.collect(step)
            if details is not None and at is not None:
                details.spend(at, step.seconds, step.dim, step.kind)
        elif isinstance(step, Wait):
            times.wait(step)
    seconds = times.clock.run()
    outcome = Outcome(
        source="simulated",
        seconds=seconds,
        peak=memory.peak,
        recompute_seconds=times.recompute,
        stall_seconds=max(0.0, seconds - times.work),
        reserved=allocator.peak_reserved if allocator is not None else None,
        traffic=memory.traffic,
    )
    if details is None:
        return outcome
    lanes, moments = _lanes(times.clock, details.spans), _dated(details.moments, times.clock)
    return _with_details(outcome, steps, schedule, lanes, moments, details.worst)


class _Memory:
    """Bytes by tier, in the order of the program."""

    __slots__ = ("_allocator", "_home", "_info", "_live", "kinds", "peak", "traffic")

    def __init__(self, schedule: Schedule, allocator: Allocator | None) -> None:
        self._home, self._allocator = schedule.home, allocator
        self._info = {**schedule.trace.tensors, **schedule.added}
        self._live: dict[str, int] = {schedule.home: 0}
        self.kinds = dict.fromkeys(Kind, 0)
        self.traffic: dict[str, int] = {}
        for x, t in self._info.items():
            if t.born < 0:
                self._enter((x,), schedule.start.get(x, schedule.home))
        self.peak = dict(self._live)

    def _enter(self, tensors: Iterable[int], tier: str) -> None:
        info, kinds, allocator = self._info, self.kinds, self._allocator
        is_home, total = tier == self._home, self._live.get(tier, 0)
        for x in tensors:
            t = info[x]
            nbytes = t.nbytes
            total += nbytes
            if is_home:
                kinds[t.kind] += nbytes
                if allocator is not None:
                    allocator.alloc(x, nbytes)
        self._live[tier] = total

    def run(self, step: Run) -> int:
        """Add the results of an op; returns the bytes on the device while it runs."""
        home, workspace = self._home, step.workspace
        if step.writes:
            self._enter(step.writes, home)
        if workspace and self._allocator is not None:
            self._allocator.alloc(-1, workspace)
            self._allocator.free(-1)
        now = self._live[home] + workspace
        self.peak[home] = max(self.peak[home], now)
        return now

    def bytes_of(self, step: Copy) -> int:
        return step.nbytes + sum(self._info[x].nbytes for x in step.tensors)

    def copy(self, step: Copy) -> int:
        """Add the copied tensors to their destination; returns their bytes."""
        total = self.bytes_of(step)
        if step.lands:
            self._enter(step.tensors, step.dst)
        self.peak[step.dst] = max(self.peak.get(step.dst, 0), self._live.get(step.dst, 0))
        link = f"{step.src}->{step.dst}"
        self.traffic[link] = self.traffic.get(link, 0) + total
        return total

    def drop(self, step: Drop) -> None:
        t, tier = self._info[step.tensor], step.tier
        nbytes = t.nbytes
        self._live[tier] -= nbytes
        if tier == self._home:
            self.kinds[t.kind] -= nbytes
            if self._allocator is not None:
                self._allocator.free(step.tensor)


class _Times:
    """Tasks for the clock. Methods return the place of what takes the time of computation: (task, seconds into it)."""

    __slots__ = ("_busy", "_hardware", "_launching", "_plain", "_programs", "_trace", "clock", "recompute", "work")

    def __init__(self, schedule: Schedule, hardware: Hardware) -> None:
        self.clock = Clock(hardware)
        self.recompute = self.work = 0.0
        self._hardware = hardware
        self._busy: dict[int, int] = {}  # tensor -> the task that ends its copy or host update
        each = launching(hardware)
        self._launching = each
        self._trace = schedule.trace
        self._plain = starts(schedule.trace) if each else []
        self._programs = by_program(schedule) if each else frozenset()
        if schedule.placed and each:  # parameters are clipped and stepped one by one before the host can begin an update
            self.clock.launch(schedule.placed * PLACED * each)
            self.clock.beside(HOST, schedule.placed * PLACED * each, name="clipping")

    def run(self, step: Run) -> tuple[int, float]:
        if self._launching:
            self.clock.launch(starts_of(step, self._plain, self._programs) * self._launching)
        seconds = step.seconds
        self.work += seconds
        if step.again:
            self.recompute += seconds
        return self.clock.compute(seconds)

    def beside(self, step: Run) -> tuple[int, float] | None:
        """An op outside of the compute stream. None: it overlaps computation."""
        if not self._hardware.overlap:  # the same processors, in order
            self.work += step.seconds
            return self.clock.compute(step.seconds)
        after = self._tasks((*step.reads, *step.mutates))
        task = self.clock.beside(step.stream, step.seconds, after=after, name=step.name)
        self._busy.update(dict.fromkeys(step.mutates, task))
        return None

    def copy(self, step: Copy, nbytes: int) -> tuple[int, float] | None:
        """None: the copy overlaps computation."""
        if not self._hardware.overlap:  # the processor that computes also copies
            return self.clock.compute(copy_seconds(nbytes, self._hardware, step.src, step.dst))
        if self._launching:
            self.clock.launch(starts_of_copy(step, self._trace) * self._launching)
        moved = (*step.tensors, *step.uses)
        task = self.clock.copy(step.src, step.dst, nbytes, after=self._tasks(moved), lane=step.lane, name=step.name)
        self._busy.update(dict.fromkeys(moved, task))
        return None

    def collect(self, step: Collect) -> tuple[int, float] | None:
        """None: the collective overlaps computation."""
        if not self._hardware.overlap:  # the processor that computes also sends and receives
            return self.clock.compute(step.seconds)
        after = self._tasks(step.tensors)
        task = self.clock.collect(step.lane or step.dim, step.seconds, after=after, name=step.kind)
        self._busy.update(dict.fromkeys(step.tensors, task))
        return None

    def wait(self, step: Wait) -> None:
        self.clock.wait(self._tasks(step.tensors))

    def _tasks(self, tensors: Iterable[int]) -> list[int]:
        """The running tasks that move or make these tensors, each once."""
        busy = self._busy
        return list(dict.fromkeys(busy[x] for x in tensors if x in busy))


class _Details:
    """The timeline: bytes at every op, the peak, and the lanes."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self.moments: list[_Moment] = []
        self.worst: tuple[int, int, tuple[int, ...]] = (-1, -1, ())  # (bytes, step, bytes by kind)
        self.spans: list[tuple[int, float, float, str, str]] = []  # (task, start, duration, lane, name)

    def run(self, step: Run, number: int, at: tuple[int, float], now: int, kinds: tuple[int, ...]) -> None:
        if now > self.worst[0]:
            self.worst = (now, number, kinds)
        self.moments.append((at, number, now, kinds))
        self.spend(at, step.seconds, "recompute" if step.again else "compute", _where(step, self._ops))

    def spend(self, at: tuple[int, float], seconds: float, lane: str, name: str) -> None:
        """Add time to a lane; adjacent spans with the same name are merged."""
        task, into = at
        if self.spans:
            last_task, last_into, length, last_lane, last_name = self.spans[-1]
            if (last_task, last_lane, last_name) == (task, lane, name) and abs(last_into + length - into) < 1e-12:
                self.spans[-1] = (task, last_into, length + seconds, lane, name)
                return
        self.spans.append((task, into, seconds, lane, name))


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
