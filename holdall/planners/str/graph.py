"""A step as the graph of STR's program, coarsened, and the program's answer as actions.

Blocks come in groups of neighbours, so that the graph stays small; a group has these nodes:

    inputs     the feature maps that leave with its blocks (`layer_swap`): they run once, and may be swapped
    inner      what its blocks make and hold for backward, in one or more parts: swapped, recomputed from the parts before and
               from the inputs, or kept
    fetch      nothing runs: a stage for copies that computation waits for
    backward   runs once; where only its first ops read the outputs, these come first, and the others after another fetch

Bytes that no decision concerns (states, gradients, workspaces) are those that a plain step is simulated to need at each node.
An answer names tensors to swap, with the groups beside which they leave and return, and tensors to recompute. For these the
nearest tensors that are there, also those that come back from the host, are traced op by op (`types.program.lazily`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from holdall.actions.layer_swap import LayerSwap
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.actions.reschedule.dag import Dag
from holdall.planners.autotm import spans_of
from holdall.planners.str.program import SwapStage
from holdall.simulator import lower
from holdall.simulator.curve import memory_curve
from holdall.types import Action, Block, Problem, Trace
from holdall.types.program import fault, groups, lazily

Tensors = frozenset[int]
_SHARES = 4  # of all blocks, for answers without a program


@dataclass(frozen=True, kw_only=True)
class _Node:
    """`ops`: (first, last) of the ops that it stands for; none, where last is before first. `again`: it may be recomputed."""

    blocks: tuple[Block, ...]
    ops: tuple[int, int]
    seconds: float
    tensors: Tensors = frozenset()
    again: bool = False
    backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Tensors to recompute, and for those to swap the last block beside which each leaves and the one at whose backward its
    fetch begins."""

    again: Tensors = frozenset()
    until: Mapping[int, str]
    fetch: Mapping[int, str]


class StepGraph:
    """The nodes of a step in order, and the graph of the integer program."""

    def __init__(self, problem: Problem, *, most: int, parts: int) -> None:
        self.problem, self.trace = problem, problem.trace
        spans = spans_of(self.trace)
        half = len(spans) // 2
        self.blocks = [s.block for s in spans[:half]]
        ranges = {s.block.id: (s.first, s.last) for s in spans[:half]}
        behind = {s.block.id: (s.first, s.last) for s in spans[half:]}
        self.may_move = problem.hardware.far is not None and problem.permits(LayerSwap)
        self.nodes: list[_Node] = []
        self._waiting = 0.0  # seconds of forward ops that no recomputation repeats, of the group before
        rows = grouped(self.trace, self.blocks, max(1, most // (parts + 3)))
        for row in rows:
            self._add_forward(row, ranges, parts if len(row) == 1 else 1)
        self.turn = len(self.nodes)
        for row in reversed(rows):
            first, last = behind[row[-1].id][0], behind[row[0].id][1]
            for begin, end in self._halves(row, first, last):
                for seconds, ops in ((self._waiting, (begin, begin - 1)), (self._seconds(begin, end), (begin, end))):
                    self.nodes.append(_Node(blocks=tuple(row), ops=ops, seconds=seconds, backward=True))
                self._waiting = 0.0

    def _add_forward(self, row: Sequence[Block], ranges: Mapping[int, tuple[int, int]], parts: int) -> None:
        trace = self.trace
        first, last = ranges[row[0].id][0], ranges[row[-1].id][1]
        moved = [(block, set(LayerSwap.of(trace, block).tensors(trace))) for block in row if block is not self.blocks[-1]]
        entering = frozenset(x for block, tensors in moved for x in tensors if x in block.inputs)
        self.nodes.append(_Node(blocks=tuple(row), ops=(first, first - 1), seconds=self._waiting, tensors=entering))
        repeated: dict[int, float] = {}
        held: list[int] = []
        for block in row:
            again = repeats(trace, block) if self.problem.permits(Recompute) else {}
            repeated |= again
            mine = {trace.saves[n].tensor for n in block.saves} - set(block.outputs)
            held += sorted(x for x in mine if block.first <= trace.tensors[x].born <= block.last)
        can_repeat = bool(repeated)
        total = self._seconds(first, last)
        self._waiting = total - sum(repeated.values()) if can_repeat else 0.0
        for (begin, end), tensors in _cut(trace, (first, last), held, parts):
            seconds = sum(s for op, s in repeated.items() if begin <= op <= end) if can_repeat else self._seconds(begin, end)
            self.nodes.append(
                _Node(blocks=tuple(row), ops=(begin, end), seconds=seconds, tensors=frozenset(tensors), again=can_repeat)
            )

    def _halves(self, row: Sequence[Block], first: int, last: int) -> list[tuple[int, int]]:
        """A backward in two where its first ops alone read the outputs, which need not be there for the others."""
        made = set(row[-1].outputs)
        at = max((op.id for op in self.trace.ops[first : last + 1] if made & set(op.reads)), default=last)
        return [(first, at), (at + 1, last)] if at < last else [(first, last)]

    def _seconds(self, first: int, last: int) -> float:
        return sum(op.seconds for op in self.trace.ops[first : last + 1])

    @property
    def ends(self) -> set[int]:
        """Forward nodes with which a group ends: copies out are waited for there."""
        return {n - 1 for n in range(1, self.turn + 1) if n == self.turn or self.nodes[n].blocks != self.nodes[n - 1].blocks}

    @property
    def movable(self) -> set[int]:
        """Nodes whose tensors can all leave."""
        if not self.may_move:
            return set()
        can: set[int] = set()
        for block in self.blocks[:-1]:
            can.update(LayerSwap.of(self.trace, block).tensors(self.trace))
        return {n for n, node in enumerate(self.nodes) if node.tensors and node.tensors <= can}

    def dag(self) -> Dag:
        trace, nodes = self.trace, self.nodes
        owner = {x: n for n, node in enumerate(nodes) for x in node.tensors}
        deps: list[tuple[int, ...]] = []
        for n, node in enumerate(nodes):
            mine = {owner[x] for x in self._reads(node) if x in owner} if node.again or node.backward else set()
            if n and not node.again:  # it runs once, right after the node before
                mine.add(n - 1)
            deps.append(tuple(sorted(m for m in mine if m < n)))
        size = [sum(trace.tensors[x].nbytes for x in node.tensors) for node in nodes]
        last = [max([n, *(k for k, d in enumerate(deps) if n in d)]) for n in range(len(nodes))]
        curve = memory_curve(self.problem, [])
        extra = []
        for n, node in enumerate(nodes):
            begin, end = node.ops
            there = sum(size[m] for m in range(n + 1) if last[m] >= n)
            extra.append(max(0, max(curve.high[begin : end + 1], default=curve.before[begin]) - there))
        return Dag(
            cost=tuple(max(0.0, node.seconds) for node in nodes),
            size=tuple(size),
            deps=tuple(deps),
            extra=tuple(extra),
            fixed=frozenset(n for n, node in enumerate(nodes) if not node.again),
        )

    def _reads(self, node: _Node) -> set[int]:
        first, last = node.ops
        return {x for op in self.trace.ops[first : last + 1] for x in (*op.reads, *op.mutates)}

    # answers

    def decisions(self, stages: Sequence[SwapStage]) -> Decisions:
        """What an answer of the program decides about each tensor."""
        until: dict[int, str] = {}
        fetch: dict[int, str] = {}
        again: set[int] = set()
        for n, node in enumerate(self.nodes[: self.turn]):
            leaves = [t for t, stage in enumerate(stages) if n in stage.out]
            comes = [t for t, stage in enumerate(stages) if n in stage.into and t >= self.turn - 1]
            if leaves and comes:
                until |= dict.fromkeys(node.tensors, self.nodes[min(leaves[0], self.turn - 1)].blocks[-1].name)
                fetch |= dict.fromkeys(node.tensors, self._fetched_at(comes[0]))
            elif any(n in stage.runs for stage in stages[self.turn :]):
                again |= node.tensors
        return Decisions(again=frozenset(again), until=until, fetch=fetch)

    def _fetched_at(self, stage: int) -> str:
        """The block at whose backward a fetch of this stage begins; empty: when it is needed."""
        node = self.nodes[max(stage, self.turn)]
        return node.blocks[-1].name if stage < self.turn or node.ops[1] >= node.ops[0] else ""

    def simple(self) -> list[Decisions]:
        """Answers without a program: the tensors of the first blocks leave, or are recomputed, or are recomputed from inputs
        that leave; with copies that the next block hides, or that are waited for."""
        following = {x: after.name for block, after in pairwise(self.blocks) for x in self._tensors_with(block)}
        forward = self.nodes[: self.turn]
        found = []
        for share in range(1, _SHARES + 1):
            first = [node for n, node in enumerate(forward) if n * _SHARES < share * len(forward)]
            inner = frozenset(x for node in first if node.again for x in node.tensors)
            tensors = [x for node in first for x in node.tensors]
            for moved in (tensors, [x for x in tensors if x not in inner], []):
                for names in (following, {}) if self.problem.hardware.overlap and moved else ({},):
                    named = {x: names.get(x, "") for x in moved}
                    found.append(Decisions(again=inner - set(moved), until=named, fetch=named))
        return found

    def _tensors_with(self, block: Block) -> Tensors:
        return frozenset(LayerSwap.of(self.trace, block).tensors(self.trace))

    def actions(self, decisions: Decisions) -> list[Action]:
        """Programs for blocks with tensors to recompute, and swaps."""
        trace = self.trace
        programs = [p for block in self.blocks if (p := program_of(trace, block, decisions.again)) is not None]
        kept = {n: p.tensors for n, p in lower(self.problem, programs).programs.items()}
        swaps = []
        for block in self.blocks[:-1] if self.may_move else ():
            together: dict[tuple[str, str], set[int]] = {}
            for x in LayerSwap.of(trace, block, only=decisions.until.keys(), kept=kept).tensors(trace):
                moments = self._after(decisions.until[x], block), self._after(decisions.fetch[x], block)
                together.setdefault(moments, set()).add(x)
            for (until, fetch), tensors in together.items():
                swaps.append(replace(LayerSwap.of(trace, block, only=tensors, kept=kept), until=until, fetch=fetch))
        return [*programs, *swaps]

    def _after(self, name: str, block: Block) -> str:
        """The name, if that block comes after this one and copies can run beside it; else empty."""
        return name if name and self.problem.hardware.overlap and self.trace.block(name).id > block.id else ""


def program_of(trace: Trace, block: Block, again: Collection[int]) -> Reschedule | None:
    """The block with these tensors recomputed in backward from the nearest that are there; None: none of them is its own."""
    own = {trace.saves[n].tensor for n in block.saves} & set(again)
    if not own or obstacle(trace, block):
        return None
    ops, count = region(trace, block)
    keep = {trace.saves[n].tensor for n in block.saves} - own | set(block.outputs)
    order = lazily(effects(ops), count, frozenset(keep))
    return None if fault(effects(ops), count, range(count), order) else Reschedule.of(trace, block, order)


def repeats(trace: Trace, block: Block) -> dict[int, float]:
    """Op -> seconds, of the ops that run again where all that the block makes and holds is recomputed."""
    own = {trace.saves[n].tensor for n in block.saves} - set(block.outputs)
    program = program_of(trace, block, own)
    if program is None:
        return {}
    ops, count = region(trace, block)
    return {ops[n].id: ops[n].seconds for n in program.backward if n < count}


def grouped(trace: Trace, blocks: Sequence[Block], most: int) -> list[list[Block]]:
    """Rows of neighbours with about the same bytes to hold, at most `most` rows."""
    if len(blocks) <= most:
        return [[block] for block in blocks]
    weights = [sum(trace.tensors[x].nbytes for x in {trace.saves[n].tensor for n in b.saves}) for b in blocks]
    total = sum(weights) or 1
    rows: dict[int, list[Block]] = {}
    for block, end, weight in zip(blocks, accumulate(weights), weights, strict=True):
        rows.setdefault(min(most - 1, int((end - weight / 2) * most / total)), []).append(block)
    return list(rows.values())


def _cut(trace: Trace, span: tuple[int, int], held: Sequence[int], parts: int) -> list[tuple[tuple[int, int], list[int]]]:
    """The ops of a span in parts that make about as many held bytes each, with the tensors that each makes and holds."""
    first, last = span
    total = sum(trace.tensors[x].nbytes for x in held)
    found: list[tuple[tuple[int, int], list[int]]] = []
    begin, made, size = first, list[int](), 0
    for group in groups(effects(trace.ops[first : last + 1])):
        end = first + group[-1]
        new = [x for x in held if first + group[0] <= trace.tensors[x].born <= end]
        made += new
        size += sum(trace.tensors[x].nbytes for x in new)
        if made and len(found) + 1 < parts and size < total and size * parts >= total * (len(found) + 1):
            found.append(((begin, end), made))
            begin, made = end + 1, []
    return [*found, ((begin, last), made)]
