"""MiniMalloc (ASPLOS 2023): the least height, by a search that proves it where it ends. `packing/exact.py` is the search.

It begins with the better of two greedy layouts. Where that is at the lower bound, or where too many tensors are left to search,
nothing else is done; `proved` says whether the result is known to be the least.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from holdall.layouts.best_fit import BestFit
from holdall.layouts.greedy_by_size import GreedyBySize
from holdall.packing import LaidOut
from holdall.packing.exact import Exact, least_height
from holdall.packing.orders import laid_out, lay_ground
from holdall.types.lifetimes import StepLifetimes


@dataclass(frozen=True, kw_only=True)
class MiniMalloc:
    """Depth-first search over canonical placements, within a capacity that is bisected."""

    nodes: int = 20_000  # of the search for one capacity
    largest: int = 500  # tensors; more are not searched

    name: ClassVar[str] = "minimalloc"
    paper: ClassVar[str] = "Moffitt, ASPLOS 2023 (MiniMalloc)"
    is_static: ClassVar[bool] = True

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        greedy = min((BestFit()(lifetimes), GreedyBySize()(lifetimes)), key=lambda found: found.reserved)
        assert greedy.offsets is not None
        known = dict(enumerate(greedy.offsets))
        offsets, others, floor = lay_ground(lifetimes)
        if greedy.reserved == lifetimes.load or len(others) > self.largest:
            return laid_out(lifetimes, known, proved=int(greedy.reserved == lifetimes.load))
        unit = gcd(*(lifetimes.tensors[n].size for n in others))
        found, is_proved = least_height(
            Exact(lifetimes, others), lifetimes.load - floor, greedy.reserved - floor, unit, self.nodes
        )
        if found is None:
            return laid_out(lifetimes, known, proved=int(is_proved))
        placed = {n: floor + int(offset) for n, offset in zip(others, found, strict=True)}
        return laid_out(lifetimes, offsets | placed, proved=int(is_proved))
