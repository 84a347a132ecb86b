"""vDNN: the feature maps that layers read go to host memory while the layer computes, and come back one layer ahead.

Rhu et al., MICRO 2016, arXiv 1602.08124. Layers are blocks here, and a layer's feature maps are its inputs and, where it has
layers inside, what those hold.

- Forward: the copies of a layer run beside its computation, and the next layer begins when both are over. A feature map that
  several layers read leaves with the last of them.
- Backward: beside the backward of a layer, the nearest layer before it that was offloaded is fetched, unless a convolution
  that needs no fetch lies between; the next layer's backward begins when both are over.
- Classifier layers, which read rows of features at the end of the model, stay, and so does the last layer of any model.

Policies: `all` offloads every layer, `conv` what convolutions read, `none` nothing; `dyn` takes the first of none, conv and all
that fits, in the order of the paper.

Not here: the paper also chooses cuDNN's algorithm for each convolution by the workspace that is left; torch chooses it here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.actions.layer_swap import LayerSwap
from holdall.errors import unknown_name
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.types import Action, Block, Phase, Plan, Problem, Trace
from holdall.types.trace import TensorId
from holdall.units import format_bytes

POLICIES = ("dyn", "none", "conv", "all")
_CONVOLUTION = "convolution"  # in the names of its ops


@dataclass(frozen=True, kw_only=True)
class Vdnn:
    policy: str = "dyn"  # none, conv or all; dyn: the first of them that fits

    name: ClassVar[str] = "vdnn"
    paper: ClassVar[str] = "Rhu et al., MICRO 2016, arXiv 1602.08124"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.policy not in POLICIES:
            raise unknown_name("policy of vdnn", self.policy, POLICIES)
        can_swap = problem.permits(LayerSwap) and problem.hardware.far is not None
        tried = [self.policy] if self.policy != "dyn" else [p for p in POLICIES[1:] if p == "none" or can_swap]
        found: list[tuple[int, str, list[Action]]] = []
        for policy in tried:
            actions = offloads(problem.trace, policy)
            outcome = outcome_or_never(problem, actions)
            missing = over_budget(problem, outcome)
            found.append((sum(missing.values()), policy, actions))
            if not missing:
                break
        _, policy, actions = min(found, key=lambda f: f[0])
        moved = sum(
            problem.trace.tensors[x].nbytes for a in actions if isinstance(a, LayerSwap) for x in a.tensors(problem.trace)
        )
        why = [f"policy {policy}: {len(actions)} layers offload {format_bytes(moved)} a step"]
        return finish(self, problem, actions, why=why, began=began)


def offloads(trace: Trace, policy: str) -> list[Action]:
    """The offloads of a policy, with vDNN's schedule."""
    if policy == "none":
        return []
    read = conv_inputs(trace)
    chosen: dict[int, LayerSwap] = {}
    for block in managed(trace):
        maps = {x for x in (*block.inputs, *(trace.saves[n].tensor for n in block.saves)) if is_feature_map(trace, x)}
        action = LayerSwap.of(trace, block, only=maps if policy == "all" else maps & read)
        if action.inputs or action.inner:
            chosen[block.id] = action
    fetched_at = prefetches(trace, set(chosen))
    return [_fetched(trace, action, fetched_at.get(n)) for n, action in chosen.items()]


def _fetched(trace: Trace, action: LayerSwap, at: int | None) -> LayerSwap:
    """Fetched beside the backward of layer `at`, whose end waits for it; None: when it is needed."""
    if at is None:
        return action
    after = next(b for b in reversed(trace.blocks[:at]) if b.backward is not None)
    return replace(action, fetch=trace.blocks[at].name, arrive=after.name)


def prefetches(trace: Trace, offloaded: set[int]) -> dict[int, int]:
    """Layer -> the layer beside whose backward it is fetched; one that is missing is fetched when it is needed."""
    layers = [b for b in trace.blocks if b.backward is not None]
    found: dict[int, int] = {}
    for place in reversed(range(len(layers))):
        for block in reversed(layers[:place]):
            if block.id in offloaded and block.id not in found:
                found[block.id] = layers[place].id
                break
            if is_conv(trace, block):
                break
    return found


def managed(trace: Trace) -> Sequence[Block]:
    """The feature-extraction layers: up to the last that reads more than rows of features, and never the last layer of all."""
    layers = [b for b in trace.blocks if b.backward is not None and b.saves]
    last = max((n for n, b in enumerate(layers) if any(len(shape) > 2 for shape in b.shapes)), default=len(layers))
    return layers[: min(last + 1, len(layers) - 1)]


def is_conv(trace: Trace, block: Block) -> bool:
    return any(_CONVOLUTION in op.site.op for op in trace.ops[block.first : block.last + 1])


def conv_inputs(trace: Trace) -> set[TensorId]:
    """Tensors that a convolution of forward reads."""
    forward = (op for op in trace.ops if op.site.phase is Phase.FORWARD and _CONVOLUTION in op.site.op)
    return {x for op in forward for x in op.reads}


def is_feature_map(trace: Trace, x: TensorId) -> bool:
    """Whether a tensor has rows: statistics of norms and random states have none."""
    return len(trace.tensors[x].shape) > 1
