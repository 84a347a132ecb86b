"""Cost-aware recomputation: what lies between two checkpoints is dropped in forward, and run again in backward.

Checkpoints are results of convolutions, matrix products and joins, and what enters or leaves a block. Statistics that an op
makes besides its output, as norms do, stay as well: they are small. Ops between two checkpoints are a segment, which is run
again in one of two ways:

- speed-centric: once, when backward first needs it; all its results stay until backward has used them;
- memory-centric: from its checkpoint for every op of backward that needs one of its results, and freed after that op.

The first costs time once and the memory of the whole segment. It is chosen where that is no more than the largest set of
tensors that some op works on anyway, so that the peak does not grow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.planners.superneurons.liveness import operands
from holdall.types import Block, Kind, Op, Trace
from holdall.types.program import Effect, fault, groups

STRATEGIES = ("cost-aware", "speed", "memory")
_JOINS = ("aten.add.Tensor", "aten.add_.Tensor", "aten.cat.default")
_STATISTICS = 8  # results that are smaller by this factor than the largest of their op
_STATES = (Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.BUFFER)


class OpSegment:
    """The ops between two checkpoints, in groups that run together, and their results."""

    def __init__(self, ops: Sequence[Effect], parts: Sequence[Sequence[int]]) -> None:
        self.parts = parts
        self.results = {x for part in parts for n in part for x in ops[n].writes}


def segments(ops: Sequence[Effect], count: int, checkpoints: Collection[int]) -> list[OpSegment]:
    """The segments of a forward. `checkpoints`: tensors that are not recomputed."""
    found: list[OpSegment] = []
    row: list[list[int]] = []
    for part in [*groups(ops[:count]), []]:
        if part and not any(x in checkpoints for n in part for x in ops[n].writes):
            row.append(part)
        elif row:
            found.append(OpSegment(ops, row))
            row = []
    return found


def held(ops: Sequence[Effect], count: int, segment: OpSegment, sizes: Mapping[int, int]) -> int:
    """Bytes that a speed-centric segment needs in backward: its results, and what an op that reads them works on besides."""
    readers = [op for op in ops[count:] if segment.results & {*op.reads, *op.mutates}]
    return sum(sizes[x] for x in segment.results) + max(
        (sum(sizes[x] for x in operands(op) - segment.results) for op in readers), default=0
    )


def backward_order(
    ops: Sequence[Effect], count: int, found: Sequence[OpSegment], sizes: Mapping[int, int], limit: float
) -> list[int]:
    """The backward, with segments run again where it needs them: once if they need at most `limit` bytes, else every time."""
    parts = [part for s in found for part in s.parts]
    owner = {x: part for part in parts for n in part for x in ops[n].writes if not _is_small(ops[n], x, sizes)}
    once = {part[0] for s in found if held(ops, count, s, sizes) <= limit for part in s.parts}
    order: list[int] = []
    done: set[int] = set()

    def make(x: int) -> None:
        part = owner.get(x)
        if part is None or part[0] in done:
            return
        done.add(part[0])
        inside = {y for n in part for y in ops[n].writes}
        for y in (y for n in part for y in (*ops[n].reads, *ops[n].mutates) if y not in inside):
            make(y)
        order.extend(part)

    for n in range(count, len(ops)):
        for x in (*ops[n].reads, *ops[n].mutates):
            make(x)
        order.append(n)
        done &= once
    return order


def _is_small(op: Effect, x: int, sizes: Mapping[int, int]) -> bool:
    return sizes[x] * _STATISTICS < max(sizes[y] for y in op.writes)


def limit_of(strategy: str, l_peak: int) -> float:
    """The bytes up to which segments are speed-centric."""
    return {"cost-aware": float(l_peak), "speed": float("inf"), "memory": -1.0}[strategy]


def program(trace: Trace, block: Block, limit: float) -> Reschedule | None:
    """The block with its segments run again in backward; None: it cannot run op by op, or nothing is gained."""
    if obstacle(trace, block):
        return None
    ops, count = region(trace, block)
    does = effects(ops)
    sizes = {x: 0 if trace.tensors[x].kind in _STATES else trace.tensors[x].nbytes for op in does for x in operands(op)}
    order = backward_order(does, count, segments(does, count, checkpoints(trace, block)), sizes, limit)
    if len(order) == len(ops) - count or fault(does, count, range(count), order):
        return None
    return Reschedule.of(trace, block, order)


def checkpoints(trace: Trace, block: Block) -> set[int]:
    """Results of convolutions, products and joins, and the block's outputs."""
    inside = trace.ops[block.first : block.last + 1]
    return {*block.outputs, *(x for op in inside if _is_checkpoint(trace, op) for x in (*op.writes, *op.mutates))}


def _is_checkpoint(trace: Trace, op: Op) -> bool:
    activations = {x for x in (*op.reads, *op.mutates) if trace.tensors[x].kind not in _STATES}
    return op.flops > 0 or (op.site.op in _JOINS and len(activations) > 1)
