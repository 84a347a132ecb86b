"""Plans activations around fixed actions: the placement of model states does not change between steps.

Used for other batch sizes than the sample's, for the tightest plan, under which a step that ran out of memory is retried, and
for the plan after it, which leaves the loop the bytes that it was measured to hold.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdall import api
from holdall.actions.in_backward import InBackward
from holdall.planners.auto import Auto
from holdall.planners.auto.search import Search, usable
from holdall.planning.finish import finish, over_budget
from holdall.types import Action, Plan, Problem
from holdall.units import MiB, format_bytes

MARGIN = 16 * MiB  # or 1 % of the budget: logged values, norms of gradients, the loss in a progress bar


def margin_of(budget: int) -> int:
    """Bytes of a budget that are left to small tensors of the loop."""
    return min(MARGIN, budget // 100)


def leave_to_loop(plan: Plan, budget: Mapping[str, int], held: int) -> Plan:
    """A plan for the rest of the budget, as it will be measured: under the whole budget, with the bytes that the loop holds."""
    home = next(iter(budget))
    peak = {**plan.predicted.peak, home: plan.predicted.peak[home] + held}
    why = (*plan.why, f"the loop holds {format_bytes(held)} besides the step")
    return replace(plan, budget=dict(budget), predicted=replace(plan.predicted, peak=peak), why=why)


def plan_around(problem: Problem, around: Sequence[Action], *, smallest: bool = False) -> Plan:
    """The fastest plan with these actions that fits, or the one with the smallest peak; `Infeasible` if that does not fit."""
    began = time.perf_counter()
    settled, less = tuple(around), usable(problem)
    search = Search(problem.under(settled))
    kept = search.require("keep everything", settled)
    best = None
    if smallest or over_budget(less, kept.outcome):
        search.mixes(less, settled, "states as they are")
        search.hide(less, settled)
        best = None if smallest else search.fastest(less)
    else:
        best = kept
    if best is None:
        search.segments([settled])
        best = min(search.found, key=lambda c: (c.outcome.peak[problem.home], c.outcome.seconds))
    why = [
        "the smallest peak there is" if smallest else "for a batch of another size",
        *(["states stay where they are"] if around else []),
    ]
    return finish(Auto(), problem, best.actions, why=why, began=began)


def plan_within(problem: Problem, settled: tuple[Action, ...], held: int, planning: Mapping[str, Any]) -> Plan:
    """A plan for the budget less these bytes and a margin, by the chosen planner if it places states likewise."""
    limit = problem.limit(problem.home)
    less = {**problem.budget, problem.home: max(1, limit - held - margin_of(limit))}
    if planning.get("planner", "auto") != "auto":
        made = api.plan(problem.trace, **{**planning, "budget": less})
        if settled_by(made) == settled:
            return made
    return plan_around(replace(problem, budget=less), settled)


def settled_by(plan: Plan) -> tuple[Action, ...]:
    """The actions that must not change between steps: where states live and when they are updated."""
    kept = [a for a in plan.actions if a.settles_states]
    return tuple(replace(a, late=()) if isinstance(a, InBackward) else a for a in kept)
