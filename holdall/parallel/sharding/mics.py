"""MiCS (arXiv 2205.00119): shards inside the smallest group of ranks that holds the model, repeated in the other groups, and
gradients in two hops.

    every backward    gather and reduce-scatter inside the group: torch's engine on a mesh of replicas and shards
    the last one      the sums of all backwards are all-reduced over the replicas

`hierarchical.py` has its collectives for groups of several nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from holdall.cost.sharding import ModelStates, ShardFactors, ShardStep, divisors, memory
from holdall.errors import Infeasible, InvalidInput
from holdall.types.trace import Bytes
from holdall.units import format_bytes


def mics_group(model: ModelStates, step: ShardStep, *, per_node: int, room: Bytes) -> int:
    """The smallest group whose ranks hold the model's states and gathered parameters in `room` bytes each: a part of a node, or
    whole nodes. Raises `Infeasible` with the least memory of any."""
    groups = [s for s in divisors(step.ranks) if s % per_node == 0 or per_node % s == 0]
    needs = {s: memory(ShardFactors(s, s, s), model, step) for s in groups}
    found = next((s for s in groups if needs[s] <= room), None)
    if found is None:
        raise Infeasible(
            f"no group of up to {step.ranks} ranks holds the model in {format_bytes(room)} each; "
            f"the smallest needs {format_bytes(min(needs.values()))}",
            hint="use more ranks, or offload states",
            smallest=min(needs.values()),
        )
    return found


class TwoHops:
    """Puts the sum over replicas off to the last of the `backwards` of a step, by `sum_now`, which is told before each whether
    to sum; for good, as models are sharded for good.

    A step in between would use gradients of this replica alone, so it is refused.
    """

    is_engine = True  # see `sharded.is_engines`

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        backwards: int,
        model: torch.nn.Module,
        sum_now: Callable[[bool], object],
    ) -> None:
        self._backwards, self._sum_now = backwards, sum_now
        self._begun = 0  # backwards since the last all-reduce
        self._current: int | None = None  # number of the backward that is running, by autograd
        model.register_forward_hook(self._called)
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._check)

    def _called(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        for t in tree_iter(output):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(self._backward_began)

    def _backward_began(self, grad: torch.Tensor) -> None:  # noqa: ARG002
        number = int(torch._C._current_graph_task_id())
        if number != self._current:  # the first of the outputs
            self._current = number
            self._begun = self._begun % self._backwards + 1
            self._sum_now(self._begun == self._backwards)

    def _check(self, *_: Any) -> None:
        if self._begun not in (0, self._backwards):
            raise InvalidInput(
                f"a step came after {self._begun} of {self._backwards} backwards, "
                "when gradients were not yet summed over replicas",
                hint="give fit(..., accumulate=...) the backwards of every step, and leave incomplete steps out",
            )
