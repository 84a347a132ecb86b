"""The quick planners of recomputation, whose plans the exact ones (`checkmate`, `moccasin`) begin with."""

from __future__ import annotations

from holdall.planning.menus import kind_of
from holdall.planning.segments import runs
from holdall.types import Planner, Problem

_FEW = 8  # ops; a block with no more is solved in no time


def quick_planners(problem: Problem, seconds: float) -> list[Planner]:
    """Planners that take about so many seconds in all; rockmate's menus take as long as they are given."""
    from holdall.planners.auto import Auto
    from holdall.planners.chen import Chen
    from holdall.planners.rockmate import Rockmate  # which solves its menus with `ilp`
    from holdall.planners.rotor import Rotor

    usual = Rockmate()
    kinds = {kind_of(b) for row in runs(problem.trace) for b in row if b.last - b.first >= _FEW}
    menus = usual.options * usual.peaks * len(kinds)
    return [Chen(), Rotor(), Auto(), Rockmate(time_limit=min(usual.time_limit, seconds / max(1, menus)))]
