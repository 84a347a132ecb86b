"""The schedule side of `evict`: simulate the policy on the steps, and write its evictions and recomputations into them.

A storage that was evicted and recomputed is a new tensor of the schedule: each tensor is made once, and frees are derived as
usual. Tensors that other actions move between tiers are never evicted, nor are tensors made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdall.runtime.eviction.driver import Driver
from holdall.runtime.eviction.pool import Counts, EvictionPool, wants
from holdall.runtime.eviction.replay import OpCall, Player
from holdall.runtime.eviction.storages import Maker, Rates, Storage
from holdall.types import Collect, Copy, Phase, Run, Schedule, Step, Wait
from holdall.types.schedule import Mark


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    schedule: Schedule
    counts: Counts
    before: int  # bytes in use before the step
    peak: int  # live bytes, without workspaces
    fragmentation: tuple[float, ...] = ()  # of the arena, at each request for which there was no hole


def rehearse(
    schedule: Schedule, rates: Rates, make_pool: Callable[[Driver, int], EvictionPool], *, tier: str = ""
) -> Rehearsal:
    """Simulate the policy on the schedule's steps. `tier`: that storages are swapped to. A policy that records its first step
    is simulated twice, and the result is the second."""
    rewriter = _Rewriter(schedule.copy(), rates, make_pool, tier)
    played = rewriter.play()
    record = rewriter.pool.swaps.recorded()
    if record is None:
        return played
    again = _Rewriter(schedule.copy(), rates, make_pool, tier)
    again.pool.swaps.recall(record)
    second = again.play()
    second.counts.over += played.counts.over
    return replace(second, peak=max(played.peak, second.peak))


class _Rewriter(Player):
    def __init__(self, schedule: Schedule, rates: Rates, make_pool: Callable[[Driver, int], EvictionPool], tier: str) -> None:
        self.schedule = schedule
        self.tier = tier
        self.trace = schedule.trace
        self.rates = rates
        self.steps = list(schedule.steps())
        self.ends = _ends(schedule, self.steps)
        self.moved = _moved(schedule, self.steps)
        self.there = {
            x: t.nbytes
            for x, t in (*schedule.trace.tensors.items(), *schedule.added.items())
            if t.born < 0 and x not in schedule.start
        }
        self.before = sum(self.there.values())
        super().__init__(make_pool(self, self.before))
        self.names: dict[Storage, int] = {}  # storage -> its current tensor
        self.away: dict[Storage, int] = {}  # the same of swapped ones
        self.stays: dict[int, list[Mark]] = {}  # swapped tensor -> ends of its stays on the device
        self.after: dict[int, list[Step]] = {}
        self.at = -1  # the last op of the trace that ran
        self.mark: Mark = (-1, 0)  # the last run
        self.runs: dict[int, int] = {}  # op -> number of its runs
        for step in self.steps:
            if isinstance(step, Run) and step.op >= 0:
                self.runs[step.op] = max(self.runs.get(step.op, 0), step.again)
        self.peak = self.before
        self.is_natural = False
        self.first_added = len(schedule.added) + schedule.trace.next_id  # ids from here on are copies made here

    def play(self) -> Rehearsal:
        dying: dict[int, list[int]] = {}
        for x, i in self.ends.items():
            dying.setdefault(i, []).append(x)
        is_settled = False
        for i, step in enumerate(self.steps):
            if isinstance(step, Run) and step.stream == "compute":
                if not is_settled and self._phase(step) is Phase.STEP:
                    is_settled = True
                    self._settle()
                self._run(i, step)
            else:
                if isinstance(step, Copy) and step.lands and step.dst == self.schedule.home:
                    self.pool.outside += sum(self.schedule.info(x).nbytes for x in step.tensors if x not in self.values)
                self.after.setdefault(self.at, []).append(step)
            for x in dying.get(i, ()):
                self._die(x)
        end = len(self.trace.ops)
        for x in self.names.values():
            if x >= self.first_added or x in self.stays:
                self.schedule.holds[x] = [*self.stays.get(x, ()), (end, 0)]
        self.schedule.after = self.after
        holes = tuple(self.pool.arena.fragmentation) if self.pool.arena is not None else ()
        return Rehearsal(
            schedule=self.schedule, counts=self.pool.counts, before=self.before, peak=self.peak, fragmentation=holes
        )

    def _phase(self, run: Run) -> Phase | None:
        return self.trace.ops[run.op].site.phase if run.op >= 0 else None

    def _run(self, i: int, run: Run) -> None:
        op = self.trace.ops[run.op] if run.op >= 0 else None
        is_step = self._phase(run) is Phase.STEP
        mine = [x for x in run.mutates if x in self.values]
        others = [x for x in run.mutates if x not in self.values]
        outside = [x for x in run.reads if x not in self.values and x not in run.mutates]
        stays = is_step or op is None or any(x in self.moved for x in (*run.reads, *run.writes, *run.mutates))
        info = self.schedule.info
        is_given = run.name.startswith("aten.lift_fresh")  # a constant of the program: no work, and an ordinary tensor
        is_norm = op is not None and "batch_norm" in op.site.op
        self.call(
            OpCall(
                reads=run.reads,
                writes=tuple((x, info(x).nbytes) for x in run.writes),
                changes=tuple(mine),
                cost=self.rates.cost(op.flops, op.moved) if op is not None and not is_given else 0,
                label=run.name,
                backward=run.again > 0 or self._phase(run) is Phase.BACKWARD,
                pinned=tuple(x for x in run.writes if stays or is_given or info(x).name == "constant"),
                number=i,
                outside=() if stays else tuple(outside),
                alters=() if is_norm or is_step else tuple(others),
                scratch=sum(info(x).nbytes for x in others),
            )
        )
        if stays:
            for x in mine:
                self.values[x].pinned = True
                self.pool.candidates.pop(self.values[x], None)

    def ran(self, op: OpCall, maker: Maker, made: Sequence[Storage], changes: Sequence[tuple[Storage, Storage]]) -> None:
        """The original run, reading the current tensors."""
        run = self.steps[op.number]
        assert isinstance(run, Run)
        now = {s.key: self.names[s] for s in maker.inputs}
        reads = tuple(now.get(x, x) for x in run.reads)
        mutates = tuple(now.get(x, x) for x in run.mutates)
        if (reads, mutates) != (run.reads, run.mutates):
            run = replace(run, reads=reads, mutates=mutates)
        if run.op >= 0 and run.again == 0:
            self.at = run.op
            if run != self.schedule.run(run.op):
                self.schedule.runs[run.op] = run
        else:
            self.after.setdefault(self.at, []).append(run)
        if run.op >= 0:
            self.mark = (run.op, run.again)
        for s in made:
            self.names[s] = int(s.key)  # type: ignore[call-overload]
        for old, new in changes:
            self.names[new] = self.names.pop(old)
        self.peak = max(self.peak, self.pool.live + sum(s.size for s in made))

    def _die(self, x: int) -> None:
        if x in self.there:
            self.pool.outside -= self.there.pop(x)
        s = self.values.pop(x, None)
        if s is not None:
            self.is_natural = True
            self.pool.release(s)
            self.is_natural = False

    def _settle(self) -> None:
        """Recompute referenced storages before the weights change."""
        for s in list(self.values.values()):
            if s.alive and s.maker is not None and not s.pinned:
                self.pool.fix(s)
        self.pool.swaps.end()

    # called by the pool

    def rerun(self, maker: Maker, consumes: bool) -> None:
        run = self.steps[maker.payload.number]
        assert isinstance(run, Run)
        now = {s.key: self.names[s] for s in maker.inputs}
        self.runs[run.op] += 1
        self.mark = (run.op, self.runs[run.op])
        for old, new in maker.changes:
            if not consumes:
                copy = self._copy(old)
                self.after.setdefault(self.at, []).append(
                    Run(op=-1, reads=(self.names[old],), writes=(copy,), name="copy before a change")
                )
                self.schedule.holds[copy] = [self.mark]
                now[old.key] = copy
            if wants(new, maker):
                self.names[new] = now[old.key]
                if consumes:
                    self.names.pop(old)
        writes = []
        for s in maker.outputs:
            copy = self._copy(s)
            writes.append(copy)
            if wants(s, maker):
                self.names[s] = copy
            else:  # recomputed on the way, and freed at once
                self.schedule.holds[copy] = [self.mark]
        mine = {old.key for old, _ in maker.changes}
        self.after.setdefault(self.at, []).append(
            replace(
                run,
                reads=tuple(now.get(x, x) for x in run.reads),
                writes=tuple(writes),
                mutates=tuple(now[x] for x in run.mutates if x in mine),
                workspace=run.workspace + maker.scratch,
                again=self.runs[run.op],
            )
        )
        self.peak = max(self.peak, self.pool.live + maker.scratch + sum(s.size for s in maker.outputs))

    def drop(self, storage: Storage) -> None:
        x = self.names.pop(storage)
        if storage.copied is not None:
            self.stays.setdefault(x, []).append(self.mark)
            self.away[storage] = x
            self.schedule.holds[x] = self.stays[x]
        elif not self.is_natural or x >= self.first_added or x in self.stays:
            self.schedule.holds[x] = [*self.stays.get(x, ()), self.mark]

    def send(self, storage: Storage) -> None:
        self._move(self.names[storage], self.schedule.home, self.tier)

    def sent(self, storage: Storage) -> None:
        self._wait(self.names[storage])

    def fetch(self, storage: Storage) -> None:
        x = self.names[storage] = self.away.pop(storage)
        self._move(x, self.tier, self.schedule.home)

    def arrive(self, storage: Storage) -> None:
        self._wait(self.names[storage])

    def discard(self, storage: Storage) -> None:
        if storage in self.away:
            del self.away[storage]
        elif storage in self.names:
            self._wait(self.names[storage])

    def _move(self, x: int, source: str, target: str) -> None:
        self.after.setdefault(self.at, []).append(Copy(tensors=(x,), src=source, dst=target, name="swap"))

    def _wait(self, x: int) -> None:
        self.after.setdefault(self.at, []).append(Wait(tensors=(x,)))

    def _copy(self, s: Storage) -> int:
        return self.schedule.add(self.schedule.info(int(s.key)))  # type: ignore[call-overload]


def _ends(schedule: Schedule, steps: Sequence[Step]) -> dict[int, int]:
    """Tensor -> the step after which it is freed; tensors that outlive the step are left out."""
    end = len(steps)
    at: dict[Mark, int] = {(-1, 0): -1, (len(schedule.trace.ops), 0): end}
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Run):
            if step.op >= 0:
                at[(step.op, step.again)] = i
            touched = (*step.reads, *step.writes, *step.mutates) if step.stream == "compute" else ()
        else:
            touched = step.tensors if isinstance(step, (Copy, Collect, Wait)) else (step.tensor,)
        for x in touched:
            last[x] = i
    found = {}
    for x in (*schedule.trace.tensors, *schedule.added):
        gone = max([last.get(x, -1), *(at.get(mark, -1) for mark in schedule.held(x))])
        if gone < end:
            found[x] = gone
    return found


def _moved(schedule: Schedule, steps: Sequence[Step]) -> set[int]:
    """Tensors that other actions move between tiers."""
    found = set(schedule.start)
    for step in steps:
        if isinstance(step, (Copy, Wait)):
            found.update(step.tensors)
    return found
