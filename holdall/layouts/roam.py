"""ROAM (arXiv 2310.19295): the order of ops and the layout of their tensors together.

    order    -> `packing/ordering.py`, on the steps of the plan with all that ties them (`packing/ties.py`)
    offsets  -> MiniMalloc's search, which stands for the paper's integer programs

The order is one for ops that run one by one; eager PyTorch runs them as the model and autograd do. The simulator says what the
new order needs, and the checker that it is legal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.layouts.minimalloc import MiniMalloc
from holdall.packing import LaidOut
from holdall.packing.ordering import best_order
from holdall.packing.ties import Ties
from holdall.simulator.lifetimes import PlannedStep
from holdall.types.lifetimes import StepLifetimes


@dataclass(frozen=True, kw_only=True)
class Roam:
    """Order first, then offsets."""

    nodes: int = 20_000  # of the search for offsets within one capacity

    name: ClassVar[str] = "roam"
    paper: ClassVar[str] = "Shu et al., arXiv 2310.19295 (ROAM)"
    is_static: ClassVar[bool] = True

    def reorder(self, step: PlannedStep) -> PlannedStep:
        """The step in an order with a peak that is not higher."""
        ties = Ties(step)
        order = best_order(ties.ops(), ties.updates)
        return replace(step, steps=ties.in_order(order))

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        return MiniMalloc(nodes=self.nodes)(lifetimes)
