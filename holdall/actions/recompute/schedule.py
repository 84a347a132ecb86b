"""The schedule side of `recompute`: segments of blocks, their replays, and the replays inside of these."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from holdall.actions.reschedule import ProgramRewrite, Reschedule
from holdall.actions.reschedule.gathered import now_gathered
from holdall.types import Block, Kind, Op, Run, Schedule, Trace
from holdall.types.program import Nest
from holdall.types.schedule import Kept, Mark, reading
from holdall.types.trace import Save


def labels(ops: Iterable[Op]) -> dict[str, Op]:
    """Each op of a block by name and number, counted as the runtime does."""
    counts: dict[str, int] = {}
    named = {}
    for op in ops:
        n = counts.get(op.site.op, 0)
        counts[op.site.op] = n + 1
        named[f"{op.site.op}#{n}"] = op
    return named


def keepable(trace: Trace, block: Block) -> dict[str, Op]:
    """Ops whose results may be kept: the results stay inside the block, and nothing in the block changes them later."""
    inside = trace.ops[block.first : block.last + 1]
    barred = {x for op in inside for x in op.mutates} | set(block.outputs)
    return {label: op for label, op in labels(inside).items() if op.writes and not barred & set(op.writes)}


class Rewriting:
    """State shared by all replays of one action."""

    def __init__(
        self,
        schedule: Schedule,
        blocks: Sequence[Block],
        *,
        keep: Iterable[str] = (),
        only: Iterable[int] = (),
        programs: Iterable[Reschedule] = (),
        watch: float = 0.0,
    ) -> None:
        self.schedule = schedule
        self.trace = trace = schedule.trace
        self.keep = frozenset(keep)
        self.watch = watch if self.keep else 0.0  # seconds per op of a block with kept op results
        self.only = frozenset(only)
        self.programs = {trace.block(p.block).id: p for p in programs}
        self.before: dict[int, list[int]] = {}  # block -> its buffers before its forward
        self.kept = {
            x for block in blocks for label, op in keepable(trace, block).items() if label in self.keep for x in op.writes
        }

    def asked(self, block: Block) -> list[int]:
        """The ops after which backward reads a tensor that the block released."""
        if block.id in self.programs:
            return [ProgramRewrite(self.schedule, self.trace, block).begin]
        return [s.unpacked for s in self.let_go(block) if s.unpacked is not None]

    def last_needed(self, block: Block) -> int:
        """The last op of the block that a replay has to run, if its result is not needed outside."""
        if block.id in self.programs:
            return block.last
        return max((s.packed for s in self.let_go(block)), default=-1)

    def let_go(self, block: Block) -> list[Save]:
        """Saved tensors of a block that autograd releases."""
        numbers = enumerate(block.saves)
        return [self.trace.saves[i] for n, i in numbers if not self.only or n in self.only]

    def released(self, save: Save) -> Mark:
        return (len(self.trace.ops) if save.released is None else save.released, 0)


class SegmentReplay:
    """The schedule side of one segment and of its inner segments.

    `depth`: times its ops have been recomputed at its end. `seen`: tensors made by the enclosing replay, by their originals.
    `around`: the op after which the enclosing replay begins, and its end.
    """

    def __init__(
        self,
        rewriting: Rewriting,
        blocks: Sequence[Block],
        inner: Sequence[Nest],
        *,
        depth: int = 1,
        seen: Mapping[int, int] | None = None,
        around: tuple[int, Mark] = (-1, (-1, 0)),
    ) -> None:
        self.rewriting = rewriting
        self.schedule, self.trace, self.kept = rewriting.schedule, rewriting.trace, rewriting.kept
        self.blocks = blocks
        self.inner = inner
        self.depth = depth
        self.seen = seen or {}
        self.around = around
        self.own = {x for block in blocks for op in self.trace.ops[block.first : block.last + 1] for x in op.writes}
        deferred = {n for nest in inner for n in range(nest.first, nest.last + 1)}
        self.final = [block for n, block in enumerate(blocks) if n not in deferred]

    def apply(self) -> None:
        after = min((k for block in self.blocks for k in self.rewriting.asked(block)), default=None)
        if after is None:
            return  # no backward: nothing is saved
        if self.depth == 1:
            self._begin(after)
            self.seen = now_gathered(self.trace, self.blocks, after)
        until = self._until()
        again = [
            op
            for block in self.blocks
            for op in self.trace.ops[block.first : min(block.last, until) + 1]
            if not (op.writes and set(op.writes) <= self.kept)
        ]
        order = [op.id for op in again]
        end = (order[-1], self.depth) if order else self._at_once(after)
        copies = self._copies(again, order)
        self.schedule.insert(after, self._runs(again, copies, after))
        self._hold_kept(order, until, end)
        self._hold_inputs(again, end)
        made = {**self.seen, **copies}
        self._redirect(made)
        for block in self.final:
            for buffer in self.rewriting.before.get(block.id, ()):
                self.schedule.hold(buffer, end)
        for nest in reversed(self.inner):  # backward reaches the last one first
            part = self.blocks[nest.first : nest.last + 1]
            SegmentReplay(self.rewriting, part, nest.inner, depth=self.depth + 1, seen=made, around=(after, end)).apply()

    def _begin(self, after: int) -> None:
        """Change the forward: free what backward will recompute, and copy buffers that it changes."""
        for block in self.blocks:
            if block.id in self.rewriting.programs:
                ProgramRewrite(self.schedule, self.trace, block).release()
            else:
                for save in self.rewriting.let_go(block):
                    if save.tensor in self.own and save.tensor not in self.kept:
                        self.schedule.unhold(save.tensor, [save])
            self.schedule.replays[block.id] = after
            if self.rewriting.only:
                self.schedule.retained[block.id] = frozenset(range(len(block.saves))) - self.rewriting.only
            for x in self._changed(block):
                before = self.schedule.add(self.trace.tensors[x], born=block.first)
                self.rewriting.before.setdefault(block.id, []).append(before)
                self.schedule.insert(block.first - 1, [Run(op=-1, reads=(x,), writes=(before,), name="remember a buffer")])
            if self.rewriting.watch:
                self.schedule.insert(block.first - 1, [self._watch(block)])

    def _at_once(self, after: int) -> Mark:
        """The end of a replay without ops: everything that backward needs was kept, or nothing is needed now."""
        begun, end = self.around
        return end if begun == after else (after, 0)

    def _until(self) -> int:
        """The last op to run: later ops are read by no saved tensor and no inner segment."""
        kept_now = max((self.rewriting.last_needed(block) for block in self.final), default=-1)
        return max(kept_now, *(self.blocks[nest.first].first - 1 for nest in self.inner), -1)

    def _copies(self, again: Sequence[Op], order: list[int]) -> dict[int, int]:
        """A new tensor for every recomputed one, held as the original was during its forward.

        A block's output is held until the last block that reads it is over: in a replay there are no other readers.
        """
        ends = {x: block.last for block in self.blocks for x in block.outputs}
        ends.update({x: block.last for block in self.blocks for x in block.inputs})
        by_program = {op.id for b in self.blocks if b.id in self.rewriting.programs for op in _inside(self.trace, b)}
        copies: dict[int, int] = {}
        for op in again:
            for x in op.writes:
                info = self.trace.tensors[x]
                copies[x] = self.schedule.add(info)
                if x in ends or op.id not in by_program:
                    self.schedule.holds[copies[x]] = [(_mark(order, ends.get(x, info.freed)), self.depth)]
        return copies

    def _runs(self, again: Sequence[Op], copies: dict[int, int], after: int) -> list[Run]:
        runs: list[Run] = []
        for block in self.blocks:
            mine = [op for op in again if block.first <= op.id <= block.last]
            if not mine:
                continue
            if self.depth == 1:
                runs += self._gather(block, after)
            if self.rewriting.watch:
                runs.append(self._watch(block))
            for x in self._changed(block):  # one more copy during its replay
                now = self.schedule.add(self.trace.tensors[x], born=block.first)
                self.schedule.hold(now, (mine[-1].id, self.depth))
                runs.append(Run(op=-1, reads=(x,), writes=(now,), name="remember a buffer"))
            runs += [self._run(op, copies) for op in mine]
        return runs

    def _gather(self, block: Block, after: int) -> list[Run]:
        """The ops that gather the block's parameters for its backward, where that would come after the replay: they run now."""
        needed = [self.seen.get(x, x) for op in _inside(self.trace, block) for x in op.reads]
        late = {x for x in needed if self.trace.tensors[x].born > after}
        made = [self.trace.ops[k] for k in sorted({self.trace.tensors[x].born for x in late})]
        buffers = {x for op in made for x in op.reads if x not in late and self.trace.tensors[x].kind is not Kind.PARAM}
        filling = [op.id for op in made]
        filling += [k for x in buffers for k in self.trace.uses(x) if k > after and (not made or k <= made[-1].id)]
        runs = []
        for op in (self.trace.ops[k] for k in sorted(set(filling)) if k not in self.schedule.moved):
            plain = self.schedule.run(op.id)
            runs.append(replace(plain, again=1))
            self.schedule.runs[op.id] = replace(plain, reads=(), writes=(), mutates=(), seconds=0.0, workspace=0)
            self.schedule.moved[op.id] = after
        for x in buffers:
            self.schedule.holds[x] = [(made[-1].id, 1)]
        return runs

    def _run(self, op: Op, copies: dict[int, int]) -> Run:
        return Run(
            op=op.id,
            reads=tuple(copies.get(x, self.seen.get(x, x)) for x in op.reads),
            writes=tuple(copies[x] for x in op.writes),
            mutates=tuple(copies.get(x, self.seen.get(x, x)) for x in op.mutates),
            seconds=op.seconds,
            workspace=op.workspace,
            again=self.depth,
            name=op.site.op,
        )

    def _hold_kept(self, order: list[int], until: int, end: Mark) -> None:
        """A kept result is looked up when the replay reaches it; those it does not reach are freed at its end."""
        for x in self.kept:
            info = self.trace.tensors[x]
            if any(block.first <= info.born <= block.last for block in self.final):
                reached = order and info.born <= until
                self.schedule.hold(x, (_mark(order, info.freed), self.depth) if reached else end)

    def _hold_inputs(self, again: Sequence[Op], end: Mark) -> None:
        """Keep tensors from outside alive until the replay has read them."""
        outside = {x for op in again for x in op.reads if x not in self.own}
        outside |= {x for block in self.blocks for x in block.inputs if x not in self.own}
        for x in outside:
            if self.trace.tensors[x].born >= 0:
                self.schedule.hold(self.seen.get(x, x), end)

    def _redirect(self, made: Mapping[int, int]) -> None:
        """Autograd holds the recomputed tensors, and backward reads them in place of the released saves; blocks with a program
        continue from them."""
        programs = self.rewriting.programs
        for block in reversed(self.final):
            if block.id in programs:
                rewrite = ProgramRewrite(self.schedule, self.trace, block, now=made, ran=self.depth + 1)
                rewrite.walk_backward(programs[block.id].backward)
                self.schedule.programs[block.id] = Kept(rewrite.kept(programs[block.id].backward), rewrite.begin)
        for save in (s for block in self.final if block.id not in programs for s in self.rewriting.let_go(block)):
            now = made.get(save.tensor)
            if now is None:
                continue
            self.schedule.hold(now, self.rewriting.released(save))
            if save.unpacked is None:
                continue
            for op in self.trace.uses(save.tensor):
                if save.unpacked < op <= self.rewriting.released(save)[0]:
                    run = self.schedule.run(op)
                    self.schedule.runs[op] = reading(run, tuple(now if x == save.tensor else x for x in run.reads))

    def _watch(self, block: Block) -> Run:
        """Finding kept results costs time per op of the block, in the forward and in every replay."""
        seconds = self.rewriting.watch * (block.last - block.first + 1)
        return Run(op=-1, reads=(), writes=(), seconds=seconds, name="watch for kept ops")

    def _changed(self, block: Block) -> list[int]:
        """Buffers that the block changes."""
        ops = self.trace.ops[block.first : block.last + 1]
        found = dict.fromkeys(x for op in ops for x in op.mutates if x not in self.own)
        return [x for x in found if self.trace.tensors[x].kind is Kind.BUFFER]


def _inside(trace: Trace, block: Block) -> Sequence[Op]:
    return trace.ops[block.first : block.last + 1]


def _mark(order: list[int], freed: int | None) -> int:
    """The op of the replay after which a local reference ends; at the last op all end."""
    if freed is None or freed >= order[-1]:
        return order[-1]
    position = bisect_right(order, freed) - 1
    return order[max(position, 0)]
