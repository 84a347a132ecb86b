"""LoongTrain's selective checkpoint++: recompute every layer, except its attention.

Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism" (arXiv 2406.18485). A layer
keeps its input and, of its inner results, only attention's output with its log-sum-exp: one tensor of the size of the hidden
state avoids the whole quadratic part of the recomputation. Results are kept per call, not per layer, so several micro-batches
may be in flight. Written-out attention has two products; both results are kept, the softmax between them is recomputed. The
paper's parallel parts (heads, context, double rings) are not implemented.
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
    """The block recomputed with its attention's results kept: op by op, or by its own code where that is impossible."""
    held = {x for op in products(trace, block) for x in op.writes}
    return keeping(trace, block, held) or Recompute.of(trace, [block], attention_labels(trace, block))


def products(trace: Trace, block: Block) -> list[Op]:
    """The products of the block's attention; for a fused one, the kernel itself."""
    return list({op.id: op for found in attentions(trace, block) for op in (found.first, found.last)}.values())


def attention_labels(trace: Trace, block: Block) -> list[str]:
    """The products of a block's attention, as results to keep."""
    ops = {op.id for op in products(trace, block)}
    return [label for label, op in keepable(trace, block).items() if op.id in ops]


def described(trace: Trace, layers: list[Block], kept: dict[int, list[str]]) -> str:
    if not any(kept.values()):
        return f"no attention was found: {len(layers)} blocks are recomputed as a whole"
    size = sum(
        trace.tensors[x].nbytes
        for block in layers
        for label, op in keepable(trace, block).items()
        if label in kept[block.id]
        for x in op.writes
    )
    flops = sum(op.flops for block in layers for found in attentions(trace, block) for op in {found.first, found.last})
    return (
        f"{len(layers)} layers are recomputed except attention: keeping {format_bytes(size)} saves "
        f"{flops / 1e9:.3g} GFLOP of recomputation"
    )
