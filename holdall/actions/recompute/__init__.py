"""Recompute: free the saved tensors of consecutive blocks, keep their inputs, and run the blocks again in backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). With `keep`, results of single ops inside the
blocks stay and are not computed again; with `only`, autograd releases some saved tensors and holds the others (selective
recompute, Korthikanti et al., arXiv 2205.05198). With `inner`, the replay itself frees again the saved tensors of some blocks
(Griewank and Walther's Revolve, 2000; Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214).
With `programs`, blocks always run op by op, and hold after their last replay the tensors that their program keeps (Rockmate,
Zhao et al., ICML 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.recompute.schedule import Rewriting, SegmentReplay
from holdall.actions.recompute.schedule import keepable as keepable
from holdall.actions.reschedule import Reschedule
from holdall.errors import InvalidInput, Unsupported
from holdall.types import Block, Choice, Facts, Kind, Problem, Schedule, Trace
from holdall.types.program import Nest

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_WATCH_SECONDS = 2e-5  # per op of a block with kept op results: an estimate of the mode that finds them
_OWN_RANDOM = "aten._cudnn_rnn.default"


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Consecutive blocks of a segment that are a segment of their own in its replay."""

    blocks: tuple[str, ...]
    inner: tuple[Inner, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recompute(Facts):
    blocks: tuple[str, ...]  # consecutive block calls, replayed together
    keep: tuple[str, ...] = ()  # op results that stay, as `aten.mm.default#3`, counted within each block
    state: tuple[str, ...] = ()  # buffers that the blocks change, restored after the replay
    only: tuple[int, ...] = ()  # numbers of the saved tensors to release, counted within each block; empty: all
    inner: tuple[Inner, ...] = ()  # segments of the replay, in order
    programs: tuple[Reschedule, ...] = ()  # of blocks that run by a program

    name: ClassVar[str] = "recompute"
    exact: ClassVar[bool] = True
    on_shards: ClassVar[bool] = True
    rank: ClassVar[int] = 10
    by_default: ClassVar[bool] = True
    spares_activations: ClassVar[bool] = True
    what: ClassVar[str] = "blocks are run again in backward"

    @property
    def by_ops(self) -> tuple[str, ...]:
        return tuple(program.block for program in self.programs)

    @staticmethod
    def of(
        trace: Trace,
        blocks: Sequence[Block],
        keep: Iterable[str] = (),
        *,
        only: Iterable[int] = (),
        inner: Iterable[Inner] = (),
        programs: Iterable[Reschedule] = (),
    ) -> Recompute:
        """The action for these blocks of a trace."""
        state = dict.fromkeys(
            trace.tensors[x].name
            for block in blocks
            for op in trace.ops[block.first : block.last + 1]
            for x in op.mutates
            if trace.tensors[x].kind is Kind.BUFFER
        )
        names = tuple(b.name for b in blocks)
        return Recompute(
            blocks=names,
            keep=tuple(keep),
            state=tuple(state),
            only=tuple(only),
            inner=tuple(inner),
            programs=tuple(programs),
        )

    @staticmethod
    def samples(trace: Trace) -> list[Recompute]:
        """One block; two neighbours; three of which two are an inner segment; one block with an op's result kept; one that
        releases a single tensor; two neighbours of which one runs by a program."""
        can = [b for b in trace.blocks if b.saves and not obstacle(trace, [b])]
        found = [Recompute.of(trace, [b]) for b in can[:1]]
        for a, b in pairwise(can):
            if a.last + 1 == b.first and a.id + 1 == b.id:
                found.append(Recompute.of(trace, [a, b]))
                break
        for a, b, c in zip(can, can[1:], can[2:], strict=False):
            if (a.last + 1, b.last + 1, b.id - a.id, c.id - b.id) == (b.first, c.first, 1, 1):
                found.append(Recompute.of(trace, [a, b, c], inner=[Inner(blocks=(a.name, b.name))]))
                break
        for b in can:
            kept = list(keepable(trace, b))
            if kept:
                found.append(Recompute.of(trace, [b], kept[:1]))
                found.append(Recompute.of(trace, [b], only=[len(b.saves) // 2]))
                break
        for a, b in pairwise(can):
            program = next(iter(Reschedule.samples_of(trace, [a])), None)
            if program is not None and a.last + 1 == b.first and a.id + 1 == b.id:
                found.append(Recompute.of(trace, [a, b], programs=[program]))
                break
        return found

    @classmethod
    def choices(cls, problem: Problem, block: Block) -> Iterable[Choice]:
        if not obstacle(problem.trace, [block]):
            yield WHOLE

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace = problem.trace
        blocks = [trace.block(name) for name in self.blocks]
        nests = nested(self.blocks, self.inner)
        why_not = obstacle(trace, blocks, nests)
        if why_not:
            raise Unsupported(
                f"`{self.blocks[0]}` cannot be recomputed: {why_not}", hint='plan the block with "keep" or "offload"'
            )
        if self.programs and (self.keep or self.only):
            raise InvalidInput(
                "a segment with `programs` takes neither `keep` nor `only`",
                hint="leave out `keep` and `only`: the programs decide what is kept",
            )
        for program in self.programs:
            program.check(trace)
        hidden = problem.hardware.overlap  # the launching thread runs ahead of the device
        rewriting = Rewriting(
            schedule.copy(),
            blocks,
            keep=self.keep,
            only=self.only,
            programs=self.programs,
            watch=0.0 if hidden else _WATCH_SECONDS,
        )
        SegmentReplay(rewriting, blocks, nests).apply()
        return rewriting.schedule

    def install(self, harness: Harness) -> None:
        last = len(self.blocks) - 1
        for position, name in enumerate(self.blocks):
            policy = harness.policy(name)
            policy.recompute = True
            policy.opens, policy.closes = position == 0, position == last
            policy.keep = frozenset(self.keep)
            policy.only = frozenset(self.only)
            policy.inner = nested(self.blocks, self.inner)
            path = name.partition("#")[0]
            policy.state = tuple(b for b in self.state if b.startswith(f"{path}."))
            altered = harness.plan.about.alters
            policy.alters = frozenset(a.removeprefix(f"{path}.") for a in altered if a.startswith(f"{path}."))
        for program in self.programs:
            program.install(harness)


def _whole(trace: Trace, block: Block) -> tuple[Recompute]:
    return (Recompute.of(trace, [block]),)


WHOLE = Choice(label="recompute", make=_whole, recomputes=True, for_all=True, lean=True)
"""One block, recomputed as a whole."""


def nested(blocks: Sequence[str], inner: Sequence[Inner]) -> tuple[Nest, ...]:
    """The inner segments by position. Raises if they overlap, are out of order, or are not consecutive in `blocks`."""
    found: list[Nest] = []
    for part in inner:
        first = blocks.index(part.blocks[0]) if part.blocks and part.blocks[0] in blocks else -1
        last = first + len(part.blocks) - 1
        after = found[-1].last + 1 if found else 0
        if first < after or tuple(blocks[first : last + 1]) != part.blocks:
            raise InvalidInput(
                f"the inner segment {list(part.blocks)} is not consecutive in {list(blocks[after:])}",
                hint="list disjoint runs of the segment's blocks, in order",
            )
        found.append(Nest(first, last, nested(part.blocks, part.inner)))
    return tuple(found)


def obstacle(trace: Trace, blocks: Sequence[Block], inner: Sequence[Nest] = ()) -> str:
    """Why these blocks cannot be run a second time; empty if they can."""
    inside: set[int] = set()
    for block in blocks:
        if block.once:
            return block.once
        for op in trace.ops[block.first : block.last + 1]:
            if op.random and op.site.op == _OWN_RANDOM:
                return "its dropout uses cuDNN's own random state, which cannot be restored"
            inside.update(op.writes)
            for x in op.mutates:
                if x not in inside and block.spoils(trace.tensors[x]):
                    return f"`{op.site.op}` changes {trace.tensors[x].name} in place, which it did not make"
    for nest in inner:
        part = blocks[nest.first : nest.last + 1]
        later = [op for b in blocks[nest.last + 1 :] for op in trace.ops[b.first : b.last + 1]]
        taken = {x for b in part for op in trace.ops[b.first : b.last + 1] for x in op.reads if trace.tensors[x].born < b.first}
        spoilt = next((op for op in later if taken & set(op.mutates) & inside), None)
        if spoilt is not None:
            return f"`{spoilt.site.op}` changes an input of the second replay of `{part[0].name}` in place"
        why_not = obstacle(trace, part, nest.inner)
        if why_not:
            return why_not
    return ""
