"""TFLite's greedy by size (Pisarchyk & Lee, 2020): tensors by decreasing size, each in the smallest gap that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.packing import LaidOut
from holdall.packing.gaps import place_in_order
from holdall.packing.orders import by_size, laid_out, lay_ground
from holdall.types.lifetimes import StepLifetimes


@dataclass(frozen=True, kw_only=True)
class GreedyBySize:
    """The gap is one between tensors that are alive at the same time, or the end above them."""

    name: ClassVar[str] = "greedy_by_size"
    paper: ClassVar[str] = "Pisarchyk & Lee, 2020 (TFLite)"
    is_static: ClassVar[bool] = True

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        offsets, others, floor = lay_ground(lifetimes)
        placed = place_in_order(lifetimes, by_size(lifetimes, others), floor=floor, tight=True)
        return laid_out(lifetimes, offsets | placed.offsets)
