"""Recompute: drop what consecutive blocks saved, keep their inputs, run them again when backward reaches them.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). With `keep`, results of single ops inside the
blocks stay and are not computed again (selective recompute, Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from holdall.errors import Unsupported
from holdall.types import Block, Kind, Op, Problem, Run, Schedule, Trace
from holdall.types.schedule import Mark

_WATCH_SECONDS = 2e-5  # per op of a block whose op results are kept: an estimate of the mode that watches for them


@dataclass(frozen=True, kw_only=True)
class Recompute:
    blocks: tuple[str, ...]  # consecutive block calls, replayed together
    keep: tuple[str, ...] = ()  # op results that stay, as `aten.mm.default#3`, counted within each block
    state: tuple[str, ...] = ()  # buffers that the blocks change, put back after the replay

    name: ClassVar[str] = "recompute"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 10

    @staticmethod
    def of(trace: Trace, blocks: Sequence[Block], keep: Iterable[str] = ()) -> Recompute:
        """The action for these blocks of a trace."""
        state = dict.fromkeys(
            trace.tensors[x].name
            for block in blocks
            for op in trace.ops[block.first : block.last + 1]
            for x in op.mutates
            if trace.tensors[x].kind is Kind.BUFFER
        )
        return Recompute(blocks=tuple(b.name for b in blocks), keep=tuple(keep), state=tuple(state))

    @staticmethod
    def samples(trace: Trace) -> list[Recompute]:
        """One block, two neighbours, one block with an op's result kept."""
        can = [b for b in trace.blocks if b.saves and not obstacle(trace, [b])]
        found = [Recompute.of(trace, [b]) for b in can[:1]]
        for a, b in pairwise(can):
            if a.last + 1 == b.first and a.id + 1 == b.id:
                found.append(Recompute.of(trace, [a, b]))
                break
        for b in can:
            kept = list(keepable(trace, b))
            if kept:
                found.append(Recompute.of(trace, [b], kept[:1]))
                break
        return found

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace = problem.trace
        blocks = [trace.block(name) for name in self.blocks]
        why_not = obstacle(trace, blocks)
        if why_not:
            raise Unsupported(f"`{self.blocks[0]}` cannot be recomputed: {why_not}", hint="keep or offload it")
        saves = [trace.saves[i] for block in blocks for i in block.saves]
        asked = [s.unpacked for s in saves if s.unpacked is not None]
        if not asked:
            return schedule  # no backward, nothing is held
        hidden = problem.hardware.overlap  # the launching thread is ahead of the device
        return _Rewrite(schedule.copy(), trace, blocks, frozenset(self.keep), watch=0.0 if hidden else _WATCH_SECONDS).apply(
            after=min(asked), until=max(s.packed for s in saves)
        )

    def install(self, harness: Any) -> None:
        last = len(self.blocks) - 1
        for position, name in enumerate(self.blocks):
            policy = harness.policy(name)
            policy.recompute = True
            policy.opens, policy.closes = position == 0, position == last
            policy.keep = frozenset(self.keep)
            path = name.partition("#")[0]
            policy.state = tuple(b for b in self.state if b.startswith(f"{path}."))


def obstacle(trace: Trace, blocks: Sequence[Block]) -> str:
    """Why these blocks cannot be run a second time; empty if they can."""
    inside: set[int] = set()
    for block in blocks:
        for op in trace.ops[block.first : block.last + 1]:
            inside.update(op.writes)
            for x in op.mutates:
                if x not in inside and trace.tensors[x].kind is not Kind.BUFFER:
                    return f"`{op.site.op}` changes {trace.tensors[x].name} in place, which is not its own"
    return ""


def labels(ops: Iterable[Op]) -> dict[str, Op]:
    """Each op of a block by name and count, as the runtime counts them."""
    counts: dict[str, int] = {}
    named = {}
    for op in ops:
        n = counts.get(op.site.op, 0)
        counts[op.site.op] = n + 1
        named[f"{op.site.op}#{n}"] = op
    return named


def keepable(trace: Trace, block: Block) -> dict[str, Op]:
    """Ops whose results may be kept: they make something that nothing in the block changes later and that stays inside it."""
    inside = trace.ops[block.first : block.last + 1]
    barred = {x for op in inside for x in op.mutates} | set(block.outputs)
    return {label: op for label, op in labels(inside).items() if op.writes and not barred & set(op.writes)}


class _Rewrite:
    """The schedule side of one segment."""

    def __init__(
        self, schedule: Schedule, trace: Trace, blocks: Sequence[Block], keep: frozenset[str], *, watch: float
    ) -> None:
        self.watch = watch  # seconds per op of a block whose op results are kept
        self.schedule = schedule
        self.trace = trace
        self.blocks = blocks
        self.kept = {x for block in blocks for label, op in keepable(trace, block).items() if label in keep for x in op.writes}
        self.own = {x for block in blocks for op in trace.ops[block.first : block.last + 1] for x in op.writes}
        self.numbers = {i for block in blocks for i in block.saves}

    def apply(self, *, after: int, until: int) -> Schedule:
        """Replay after op `after`; ops up to `until` (forward) are needed again."""
        again = [
            op
            for block in self.blocks
            for op in self.trace.ops[block.first : min(block.last, until) + 1]
            if not (op.writes and set(op.writes) <= self.kept)
        ]
        for block in self.blocks:
            self.schedule.replays[block.id] = after
        if not again:  # all that backward needs was kept; what the segment holds goes when backward asks
            for x in self.kept:
                self.schedule.hold(x, (after, 0))
            self._hold_inputs([], (after, 0))
            return self.schedule
        order = [op.id for op in again]
        copies = self._copies(again, order, until)
        runs: list[Run] = []
        for block in self.blocks:
            mine = [op for op in again if block.first <= op.id <= block.last]
            if mine:
                runs += self._watched(block)
                runs += [*self._remember(block, mine[-1].id, order[-1]), *(self._run(op, copies) for op in mine)]
        self.schedule.insert(after, runs)
        self._hold_inputs(again, (order[-1], 1))
        self._redirect(copies)
        return self.schedule

    def _copies(self, again: Sequence[Op], order: list[int], until: int) -> dict[int, int]:
        """A second tensor for everything made again, held as the first was while it was made, then by autograd."""
        end = len(self.trace.ops)
        mine: dict[int, list[Any]] = {}
        for i in self.numbers:
            mine.setdefault(self.trace.saves[i].tensor, []).append(self.trace.saves[i])
        copies: dict[int, int] = {}
        for op in again:
            for x in op.writes:
                info = self.trace.tensors[x]
                copy = self.schedule.add(info)
                copies[x] = copy
                saves = mine.get(x, [])
                self.schedule.hold(
                    copy,
                    (_mark(order, info.freed), 1),
                    *((end if s.released is None else s.released, 0) for s in saves),
                )
                self.schedule.unhold(x, saves)
        for x in self.kept:  # retrieved when the replay comes to it; what it does not come to goes at its end
            info = self.trace.tensors[x]
            self.schedule.hold(x, (_mark(order, info.freed if info.born <= until else None), 1))
        return copies

    def _run(self, op: Op, copies: dict[int, int]) -> Run:
        return Run(
            op=op.id,
            reads=tuple(copies.get(x, x) for x in op.reads),
            writes=tuple(copies[x] for x in op.writes),
            mutates=tuple(copies.get(x, x) for x in op.mutates),
            seconds=op.seconds,
            workspace=op.workspace,
            again=1,
            name=op.site.op,
        )

    def _hold_inputs(self, again: Sequence[Op], mark: Mark) -> None:
        """What comes from outside must still be there for the replay."""
        outside = {x for op in again for x in op.reads if x not in self.own}
        outside |= {x for block in self.blocks for x in block.inputs if x not in self.own}
        for x in outside:
            if self.trace.tensors[x].born >= 0:
                self.schedule.hold(x, mark)

    def _redirect(self, copies: dict[int, int]) -> None:
        """Backward reads the copies wherever it would have read through a save of these blocks."""
        for i in self.numbers:
            save = self.trace.saves[i]
            if save.tensor not in copies or save.unpacked is None:
                continue
            until = len(self.trace.ops) if save.released is None else save.released
            for op in self.trace.uses(save.tensor):
                if save.unpacked < op <= until:
                    run = self.schedule.run(op)
                    self.schedule.runs[op] = replace(run, reads=tuple(copies[x] if x == save.tensor else x for x in run.reads))

    def _watched(self, block: Block) -> list[Run]:
        """Keeping results of ops costs time in the forward and in the replay, for every op of the block."""
        if not self.kept or not self.watch:
            return []
        watch = Run(op=-1, reads=(), writes=(), seconds=self.watch * (block.last - block.first + 1), name="watch for kept ops")
        self.schedule.insert(block.first - 1, [watch])
        return [watch]

    def _remember(self, block: Block, last: int, end: int) -> list[Run]:
        """Buffers the block changes: one copy from before its forward, one for the time of its replay."""
        changed = dict.fromkeys(
            x
            for op in self.trace.ops[block.first : block.last + 1]
            for x in op.mutates
            if x not in self.own and self.trace.tensors[x].kind is Kind.BUFFER
        )
        runs = []
        for x in changed:
            info = self.trace.tensors[x]
            before, now = self.schedule.add(info, born=block.first), self.schedule.add(info, born=block.first)
            self.schedule.insert(block.first - 1, [Run(op=-1, reads=(x,), writes=(before,), name="remember a buffer")])
            self.schedule.hold(before, (end, 1))
            self.schedule.hold(now, (last, 1))
            runs.append(Run(op=-1, reads=(x,), writes=(now,), name="remember a buffer"))
        return runs


def _mark(order: list[int], freed: int | None) -> int:
    """The op of the replay after which a local reference ends; the last one ends all."""
    if freed is None or freed >= order[-1]:
        return order[-1]
    position = bisect_right(order, freed) - 1
    return order[max(position, 0)]
