"""Budget against predicted step time: the time that less memory costs."""

from __future__ import annotations

from dataclasses import dataclass

from holdall.analysis.smallest import PlanFor, needed
from holdall.errors import Infeasible, InvalidInput
from holdall.types import Plan, Progress
from holdall.types.plan import silent
from holdall.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Point:
    budget: int
    plan: Plan
    is_best: bool  # no other point is as fast with less memory

    @property
    def seconds(self) -> float:
        return self.plan.predicted.seconds


@dataclass(frozen=True, kw_only=True)
class Curve:
    """`points`: from the smallest budget to the largest. `refused`: budgets without a plan."""

    points: tuple[Point, ...]
    refused: tuple[int, ...]

    @property
    def best(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if p.is_best)


def pareto(plan_for: PlanFor, *, most: int, points: int = 8, progress: Progress = silent) -> Curve:
    """Plans at `points` budgets, evenly from the smallest feasible one to the fastest plan's need (or `most`)."""
    if points < 2:
        raise InvalidInput(f"a curve of {points} points", hint="use at least 2")
    progress("planning with all the memory", 0, points, "")
    fastest = plan_for(most)
    high = needed(fastest)
    found: dict[int, Plan] = {high: fastest}
    refused = []
    least = _least(plan_for, high)
    budgets = [least + (high - least) * k // (points - 1) for k in range(points - 1)]
    for n, budget in enumerate(sorted({b for b in budgets if b < high}, reverse=True), 1):
        progress(f"planning for {format_bytes(budget)}", n, points, "")
        try:
            found[budget] = plan_for(budget)
        except Infeasible:
            refused.append(budget)
    return Curve(points=_ranked(found), refused=tuple(sorted(refused)))


def _least(plan_for: PlanFor, high: int) -> int:
    """The smallest budget that an `Infeasible` error names; planners search for it when nothing fits."""
    try:
        plan_for(1)
    except Infeasible as error:
        if error.smallest is not None:
            return min(error.smallest, high)
    return high


def _ranked(found: dict[int, Plan]) -> tuple[Point, ...]:
    points = []
    fastest = float("inf")
    for budget in sorted(found):
        seconds = found[budget].predicted.seconds
        points.append(Point(budget=budget, plan=found[budget], is_best=seconds < fastest))
        fastest = min(fastest, seconds)
    return tuple(points)
