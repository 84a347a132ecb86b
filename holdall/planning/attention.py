"""Finds attention in a block of the trace: the ops that multiply activations with activations.

Everywhere else in a network one side of a product is a weight. So an op that costs FLOPs and reads only tensors that depend on
the block's inputs is part of attention: either all of it (a fused kernel), or one of the two products around a written-out
softmax. Names of modules and ops play no part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdall.types import Block, Kind, Op, Trace

_GIVEN = (Kind.PARAM, Kind.BUFFER, Kind.STATE)


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention of a block."""

    first: Op  # its first product; for a fused kernel, all of it
    last: Op
    inside: tuple[Op, ...]  # ops that depend on the first product and that the last needs, both included

    @property
    def is_fused(self) -> bool:
        return self.first.id == self.last.id


def products(trace: Trace, block: Block) -> list[Op]:
    """Ops that multiply activations with activations."""
    active = {x for x in block.inputs if trace.tensors[x].kind not in _GIVEN}
    found = []
    for op in trace.ops[block.first : block.last + 1]:
        if any(x in active for x in (*op.reads, *op.mutates)):
            active.update(op.writes)
        if op.flops and op.reads and all(x in active for x in op.reads):
            found.append(op)
    return found


def attentions(trace: Trace, block: Block) -> list[Attention]:
    """Every attention of a block, in order."""
    found, waiting = [], products(trace, block)
    while waiting:
        first = waiting.pop(0)
        after = _descendants(trace, block, first)
        last = next((op for op in waiting if after & set(op.reads)), None)
        if last is None:
            found.append(Attention(first, first, (first,)))  # one fused kernel
            continue
        waiting.remove(last)
        before = _ancestors(trace, block, last)
        between = trace.ops[first.id + 1 : last.id]
        inside = [op for op in between if after & {*op.reads, *op.mutates} and before & {*op.writes, *op.mutates}]
        found.append(Attention(first, last, (first, *inside, last)))
    return found


def _descendants(trace: Trace, block: Block, op: Op) -> set[int]:
    """Tensors made in the block from an op's results, these included."""
    found = set(op.writes)
    for later in trace.ops[op.id + 1 : block.last + 1]:
        if found & set(later.reads):
            found.update(later.writes)
    return found


def _ancestors(trace: Trace, block: Block, op: Op) -> set[int]:
    """Tensors of the block that an op's results depend on."""
    found = set(op.reads)
    for earlier in reversed(trace.ops[block.first : op.id]):
        if found & {*earlier.writes, *earlier.mutates}:
            found.update(earlier.reads)
    return found


def with_attention(trace: Trace, blocks: Iterable[Block]) -> list[Block]:
    """The blocks with attention; every block if there is none."""
    blocks = list(blocks)
    return [b for b in blocks if products(trace, b)] or blocks
