"""Adds updates in backward to a planner's plan.

Planners count all gradients of a step. With updates in backward the planner gets the step without them; if the memory of the
updates then exceeds the budget, it plans again for less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdall.actions.in_backward import InBackward, used_up
from holdall.errors import Infeasible
from holdall.planning.finish import finish, over_budget
from holdall.types import Action, Plan, Planner, Problem

_TRIES = 4


def plan_with_updates(planner: Planner, problem: Problem) -> Plan:
    """The planner's plan for the problem's budget with updates in backward; if none fits, the smallest one found."""
    told = replace(problem, trace=used_up(problem.trace))
    roomy = _with_budget(problem, problem.hardware.tier(problem.home).capacity)
    for _ in range(_TRIES):
        made = at_most(planner, told)
        actions = with_updates(problem, made.actions)
        why = (*made.why, "parameters are updated in backward, as gradients are made")
        ended = replace(finish(planner, roomy, actions, why=why), solve_seconds=made.solve_seconds)
        excess = over_budget(problem, ended.predicted).get(problem.home, 0)
        if not excess or over_budget(told, made.predicted):
            break
        told = _with_budget(told, told.limit(problem.home) - excess)
    return replace(ended, budget={**ended.budget, **problem.budget}) if not excess else ended


def with_updates(problem: Problem, actions: Iterable[Action]) -> list[Action]:
    """The actions with updates in backward; a `place` that only makes working copies is replaced."""
    kept = [a for a in actions if not a.places_states]
    return [*kept, InBackward.of(problem.trace, kept)]


def at_most(planner: Planner, problem: Problem) -> Plan:
    """A plan within the budget, or within the least budget for which one was found."""
    try:
        return planner(problem)
    except Infeasible as error:
        if error.smallest is None:
            raise
        return planner(_with_budget(problem, error.smallest))


def _with_budget(problem: Problem, nbytes: int) -> Problem:
    return replace(problem, budget={**problem.budget, problem.home: nbytes})
