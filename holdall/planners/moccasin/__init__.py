"""Moccasin: every result is held in at most a few intervals, found by constraint programming.

Bartan et al., "Moccasin: Efficient Tensor Rematerialization for Neural Networks" (ICML 2023, PMLR 202:1826). The model is in
`cp.py`; here a trace becomes its graph, and its answer something that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.reschedule.dag import Answer, Dag, Program
from holdall.planners.checkmate.quick import quick_planners
from holdall.planners.moccasin import cp
from holdall.planning.op_level import plan_by_ops
from holdall.types import Plan, Problem


@dataclass(frozen=True, kw_only=True)
class Moccasin:
    copies: int = 2  # times an op may run
    time_limit: float = 60.0  # seconds for each graph
    workers: int = 1  # more are faster, but two runs may then end with different answers
    scope: str = "auto"  # "model": one graph; "blocks": each kind of block by itself
    nodes: int = 300  # a model with more is solved by blocks

    name: ClassVar[str] = "moccasin"
    paper: ClassVar[str] = "Bartan et al., ICML 2023, PMLR 202:1826"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        return plan_by_ops(
            self, problem, self._solve, scope=self.scope, nodes=self.nodes, time_limit=self.time_limit, quick=quick_planners
        )

    def _solve(
        self, dag: Dag, budget: int, *, loss: int, saved_budget: int | None, seconds: float, starts: Sequence[Program]
    ) -> Answer:
        return cp.solve(
            dag,
            budget,
            copies=self.copies,
            time_limit=seconds,
            workers=self.workers,
            loss=loss if saved_budget is not None else None,
            saved_budget=saved_budget,
            starts=starts,
        )
