"""Auto: the best mix of keep, recompute and offload per block under the budget.

Menus from the simulator, a dynamic program over the chain of blocks (pofo's shape), and the simple fallbacks beside it; whatever is
chosen has been simulated whole, and a plan that is slower than a fallback that fits is not returned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.planners._chain import best_choices
from holdall.planners._finish import finish, over_budget, refuse_over_budget
from holdall.planners._menu import Menus, actions_for, make_menus
from holdall.planners._segments import segmented
from holdall.simulator import simulate
from holdall.types import Action, Outcome, Plan, Problem
from holdall.units import format_bytes, format_seconds

_TRIES = 6  # times the dynamic program may be asked again with a budget corrected by what the whole simulation said


@dataclass(frozen=True, slots=True)
class _Candidate:
    label: str
    actions: tuple[Action, ...]
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Auto:
    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "ours; after pofo (NeurIPS 2021) and Chen et al. (arXiv 1604.06174)"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        plain = _try("keep everything", (), problem)
        if not over_budget(problem, plain.outcome):
            return finish(self, problem, [], why=["everything fits: nothing needs to be done"], began=began)
        menus = make_menus(problem)
        found = [plain, *_by_program(problem, menus), *_fallbacks(problem, menus)]
        fitting = [c for c in found if not over_budget(problem, c.outcome)]
        if not fitting:
            found += _smaller(problem)
            fitting = [c for c in found if not over_budget(problem, c.outcome)]
        if not fitting:
            least = min(found, key=lambda c: c.outcome.peak[problem.home])
            outcome = simulate(problem, least.actions, full=True)
            refuse_over_budget(problem, outcome, self.name)
        best = min(fitting, key=lambda c: (c.outcome.seconds, len(c.actions)))
        return finish(self, problem, best.actions, why=_why(problem, plain, best, found), began=began)


def _try(label: str, actions: Sequence[Action], problem: Problem) -> _Candidate:
    return _Candidate(label, tuple(actions), simulate(problem, actions))


def _by_program(problem: Problem, menus: Menus) -> list[_Candidate]:
    """The dynamic program's answer, simulated; asked again with less where the whole step turns out higher."""
    budget = problem.limit(problem.home)
    found: list[_Candidate] = []
    allowed = budget
    for n in range(_TRIES):
        problem.progress("searching", n, _TRIES, "")
        answer = best_choices(menus.items, allowed, problem.hardware)
        if answer is None:
            break
        actions = [
            a
            for item, choice in zip(menus.items, answer[1], strict=True)
            for a in actions_for(problem, item.block, choice.label)
        ]
        candidate = _try("the dynamic program's mix", actions, problem)
        found.append(candidate)
        excess = candidate.outcome.peak[problem.home] - budget
        if excess <= 0:
            break
        allowed -= excess
    return found


def _fallbacks(problem: Problem, menus: Menus) -> list[_Candidate]:
    """What anyone would try by hand; the search must not lose to them."""
    found = []
    for label in ("recompute", "recompute + offload", "offload"):
        blocks = [i.block for i in menus.items if any(c.label == label for c in i.choices)]
        if blocks:
            found.append(_try(f"{label} all", [a for b in blocks for a in actions_for(problem, b, label)], problem))
    return found


def _smaller(problem: Problem) -> list[_Candidate]:
    """Last resorts, for the smallest peak rather than the least time."""
    if "recompute" not in problem.allow:
        return []
    return [_try(f"segments of {n} blocks", actions, problem) for n, actions in segmented(problem)]


def _why(problem: Problem, plain: _Candidate, best: _Candidate, found: list[_Candidate]) -> list[str]:
    budget = problem.limit(problem.home)
    extra = best.outcome.seconds - plain.outcome.seconds
    reasons = [
        f"keeping everything needs {format_bytes(plain.outcome.peak[problem.home])}, over the budget of {format_bytes(budget)}",
        f"{best.label} needs {format_bytes(best.outcome.peak[problem.home])} and adds {format_seconds(max(extra, 0.0))} a step",
    ]
    for other in found:
        if other is not best and other is not plain:
            fits = not over_budget(problem, other.outcome)
            slower = other.outcome.seconds - best.outcome.seconds
            verdict = f"would take {format_seconds(max(slower, 0.0))} more" if fits else "does not fit"
            reasons.append(f"{other.label} ({format_bytes(other.outcome.peak[problem.home])}) {verdict}")
    return list(dict.fromkeys(reasons))
