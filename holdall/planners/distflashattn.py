"""DISTFLASHATTN's rematerialisation-aware rule: a recomputed unit ends at attention, so that attention is never recomputed.

Li et al., "DISTFLASHATTN: Distributed Memory-efficient Attention for Long-context LLMs Training" (arXiv 2310.03294). The paper
moves the unit of recomputation from a layer to [output projection, MLP of layer l, norm and QKV of layer l + 1]: the unit's
result is attention's output, kept with its log-sum-exp, and q, k, v are recomputed. Here a layer is replayed when backward
first reads a tensor of it, up to the last tensor read, with the kept results at hand: the same ops are recomputed and the same
tensors are held (per layer its input, attention's output, log-sum-exp) with layers as the unit.

The paper's last unit ends with the loss, and its backward follows at once. So `last` decides whether the last layer is
recomputed after attention too (as in the paper's code) or kept there. The paper's balanced ring is not implemented.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.recompute import Recompute
from holdall.actions.reschedule.op_graph import keeping
from holdall.planners.loongtrain import all_but_attention, attention_labels, described, products
from holdall.planning.attention import attentions, with_attention
from holdall.planning.finish import finish
from holdall.planning.segments import runs
from holdall.types import Block, Plan, Problem, Trace


@dataclass(frozen=True, kw_only=True)
class Distflashattn:
    last: bool = True  # also recompute the ops after the last attention

    name: ClassVar[str] = "distflashattn"
    paper: ClassVar[str] = "Li et al. 2023, arXiv 2310.03294"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        trace = problem.trace
        layers = with_attention(trace, (block for row in runs(trace) for block in row))
        kept = {block.id: attention_labels(trace, block) for block in layers}
        actions = [all_but_attention(trace, block) for block in layers]
        why = [described(trace, layers, kept)]
        if not self.last and layers and kept[layers[-1].id]:
            block = layers[-1]
            before = up_to_attention(trace, block)
            after = {trace.saves[i].tensor for n, i in enumerate(block.saves) if n not in before}
            held = after | {x for op in products(trace, block) for x in op.writes}
            whole = Recompute.of(trace, [block], kept[block.id], only=before)
            actions[-1] = keeping(trace, block, held) or whole
            why.append(f"the last layer is recomputed up to its attention only ({len(before)} saved tensors)")
        return finish(self, problem, actions, why=why, began=began)


def up_to_attention(trace: Trace, block: Block) -> list[int]:
    """Numbers of the tensors that a block saves up to and including its last attention."""
    end = max(found.last.id for found in attentions(trace, block))
    return [n for n, i in enumerate(block.saves) if trace.saves[i].packed < end]
