"""DISTFLASHATTN's rematerialisation-aware rule: what is recomputed ends at attention, so that attention never is.

Li et al., "DISTFLASHATTN: Distributed Memory-efficient Attention for Long-context LLMs Training" (arXiv 2310.03294). The paper
moves the unit of recomputation from a layer to [output projection, MLP of layer l, norm and QKV of layer l + 1]: the unit's
result is attention's output, kept with its log-sum-exp, and q, k, v are made again. Here a layer is replayed when backward
first asks for something in it and ends at the last that is asked for, and the kept results are handed out inside: the same
ops are run again and the same tensors are held (per layer its input, attention's output, log-sum-exp) with layers as the unit.

The paper's last unit ends with the loss, and its backward follows at once. So `last` decides whether the part of the last
layer after attention is recomputed (as in the paper's code) or held. The paper's balanced ring is not here.
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
    last: bool = True  # also recompute what follows the last attention

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
            why.append(f"of the last layer only what comes before attention is recomputed ({len(before)} saved tensors)")
        return finish(self, problem, actions, why=why, began=began)


def up_to_attention(trace: Trace, block: Block) -> list[int]:
    """Numbers of the tensors that a block saves up to its last attention."""
    end = max(found.last.id for found in attentions(trace, block))
    return [n for n, i in enumerate(block.saves) if trace.saves[i].packed < end]
