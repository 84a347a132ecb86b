"""Where a model is cut into stages: by balance alone, or by a planner that also replicates stages.

A cut is written as bounds: (0, 3, 8) are two stages, layers 0 to 2 and 3 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from holdall.errors import InvalidInput
from holdall.pipelines.cuts.balanced import block_partition, even_cut
from holdall.pipelines.cuts.dapple import dapple_cut
from holdall.pipelines.cuts.layers import CutLayer, CutPlan, CutStage
from holdall.pipelines.cuts.pipedream import pipedream_cut

__all__ = [
    "CutLayer",
    "CutPlan",
    "CutStage",
    "block_partition",
    "check_bounds",
    "dapple_cut",
    "even_cut",
    "pipedream_cut",
]


def check_bounds(cut: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """The bounds of a cut that the user gave as the layers at which stages begin, without 0."""
    bounds = (0, *cut, layers)
    rising = all(low < high for low, high in pairwise(bounds))
    if len(bounds) != stages + 1 or not rising:
        raise InvalidInput(
            f"the cut {list(cut)} does not make {stages} stages of {layers} layers",
            hint=f"name {stages - 1} layers, rising from 1 to {layers - 1}, at which stages begin",
        )
    return bounds
