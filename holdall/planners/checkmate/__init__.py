"""Checkmate: for every op, in which stages of the step it is run and how long its result is held, as an integer program.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys 2020, arXiv 1910.02653). The
program itself and its relaxation with two-phase rounding are in `ilp.py`; here a trace becomes its graph, and its answer
something that runs. `method`: "milp" with a time limit (the gap that is left is told), or "lp", which is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.reschedule.dag import Answer, Dag, Program
from holdall.errors import unknown_name
from holdall.planners.checkmate import ilp
from holdall.planners.checkmate.quick import quick_planners
from holdall.planning.op_level import plan_by_ops
from holdall.types import Plan, Problem

_METHODS = ("milp", "lp")


@dataclass(frozen=True, kw_only=True)
class Checkmate:
    method: str = "milp"
    time_limit: float = 60.0  # seconds for each graph
    gap: float = 0.01  # how far from the best, of the whole time, is near enough
    scope: str = "auto"  # "model": one graph; "blocks": each kind of block by itself
    nodes: int = 300  # a model with more is solved by blocks

    name: ClassVar[str] = "checkmate"
    paper: ClassVar[str] = "Jain et al., MLSys 2020, arXiv 1910.02653"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        if self.method not in _METHODS:
            raise unknown_name("method of checkmate", self.method, _METHODS)
        return plan_by_ops(
            self, problem, self._solve, scope=self.scope, nodes=self.nodes, time_limit=self.time_limit, quick=quick_planners
        )

    def _solve(
        self, dag: Dag, budget: int, *, loss: int, saved_budget: int | None, seconds: float, starts: Sequence[Program]
    ) -> Answer:
        at = loss if saved_budget is not None else None
        if self.method == "lp":
            return ilp.round_lp(dag, budget, time_limit=seconds, loss=at, saved_budget=saved_budget)
        return ilp.solve(dag, budget, time_limit=seconds, gap=self.gap, loss=at, saved_budget=saved_budget, starts=starts)
