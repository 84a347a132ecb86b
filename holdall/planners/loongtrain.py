"""LoongTrain's selective checkpoint++: every layer is recomputed, attention never.

Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism" (arXiv 2406.18485). A layer
keeps its input, and of all results inside only that of attention with its log-sum-exp: one tensor as wide as the hidden state
buys the whole quadratic part of the recomputation. The results are kept by the call that made them, not by the number of the
layer, so several micro-batches may be under way. Written-out attention has two products; both results are kept, the
softmax between them is made again. The paper's parallel parts (heads, context, double rings) are not here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.recompute import Recompute, keepable
from holdall.actions.reschedule.op_graph import keeping
from holdall.planning.attention import attentions, with_attention
from holdall.planning.finish import finish
from holdall.planning.segments import runs
from holdall.types import Action, Block, Op, Plan, Problem, Trace
from holdall.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Loongtrain:
    name: ClassVar[str] = "loongtrain"
    paper: ClassVar[str] = "Gu et al. 2024, arXiv 2406.18485"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        trace = problem.trace
        layers = with_attention(trace, (block for row in runs(trace) for block in row))
        kept = {block.id: attention_labels(trace, block) for block in layers}
        actions = [all_but_attention(trace, block) for block in layers]
        return finish(self, problem, actions, why=[described(trace, layers, kept)], began=began)


def all_but_attention(trace: Trace, block: Block) -> Action:
    """The block made again with the results of its attention at hand: op by op, or by its own code where that cannot be."""
    held = {x for op in products(trace, block) for x in op.writes}
    return keeping(trace, block, held) or Recompute.of(trace, [block], attention_labels(trace, block))


def products(trace: Trace, block: Block) -> list[Op]:
    """Those of the block's attention; of a fused one the kernel itself."""
    return list({op.id: op for found in attentions(trace, block) for op in (found.first, found.last)}.values())


def attention_labels(trace: Trace, block: Block) -> list[str]:
    """The products of a block's attention, as results to keep."""
    ops = {op.id for op in products(trace, block)}
    return [label for label, op in keepable(trace, block).items() if op.id in ops]


def described(trace: Trace, layers: list[Block], kept: dict[int, list[str]]) -> str:
    if not any(kept.values()):
        return f"no attention was found: {len(layers)} blocks are recomputed whole"
    size = sum(
        trace.tensors[x].nbytes
        for block in layers
        for label, op in keepable(trace, block).items()
        if label in kept[block.id]
        for x in op.writes
    )
    flops = sum(op.flops for block in layers for found in attentions(trace, block) for op in {found.first, found.last})
    return (
        f"{len(layers)} layers are recomputed but for attention: {format_bytes(size)} are kept so that "
        f"{flops / 1e9:.3g} GFLOP are not spent twice"
    )
