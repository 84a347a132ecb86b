"""Auto: the best mix of keep, recompute and offload per block under the budget.

Menus from the simulator, a dynamic program over the chain of blocks (pofo's shape), and the simple fallbacks beside it;
whatever is chosen has been simulated whole, and a plan that is slower than a fallback that fits is not returned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.planners._chain import best_choices
from holdall.planners._finish import finish, over_budget
from holdall.planners._menu import Item, actions_for, make_menus
from holdall.planners._segments import segmented
from holdall.simulator import simulate
from holdall.types import Action, Outcome, Plan, Problem
from holdall.units import format_bytes, format_seconds

_ROOM = (0.0, 0.03, 0.06, 0.09, 0.13)  # shares left free, one after the other, until the allocator finds a place for everything
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
        if not over_budget(problem, plain.outcome) and self._placed(problem, ()):
            return finish(self, problem, [], why=["everything fits: nothing needs to be done"], began=began)
        menus = make_menus(problem)
        found = [plain, *_fallbacks(problem, menus)]
        for room in _ROOM:
            less = _with_less(problem, room)
            found += _by_program(less, menus)
            fitting = [c for c in found if not over_budget(less, c.outcome)]
            best = min(fitting, key=lambda c: (c.outcome.seconds, len(c.actions)), default=None)
            if best is not None and self._placed(problem, best.actions):
                return finish(self, problem, best.actions, why=_why(problem, plain, best, found), began=began)
            if best is None or problem.hardware.device != "cuda":
                break
        found += _smaller(problem)
        least = min(found, key=lambda c: c.outcome.peak[problem.home])
        return finish(self, problem, least.actions, why=_why(problem, plain, least, found), began=began)

    def _placed(self, problem: Problem, actions: Sequence[Action]) -> bool:
        """Whether the device's allocator finds a place for everything; elsewhere bytes are all that counts."""
        if problem.hardware.device != "cuda":
            return True
        return not over_budget(problem, simulate(problem, actions, allocator="caching"))


def _with_less(problem: Problem, room: float) -> Problem:
    """The same problem with a share of the accelerator's memory left free for fragmentation."""
    limit = int(problem.limit(problem.home) * (1 - room))
    return replace(problem, budget={**problem.budget, problem.home: limit})


def _try(label: str, actions: Sequence[Action], problem: Problem) -> _Candidate:
    return _Candidate(label, tuple(actions), simulate(problem, actions))


def _by_program(problem: Problem, menus: Sequence[Item]) -> list[_Candidate]:
    """The dynamic program's answer, simulated; asked again with less where the whole step turns out higher."""
    budget = problem.limit(problem.home)
    found: list[_Candidate] = []
    allowed = budget
    for n in range(_TRIES):
        problem.progress("searching", n, _TRIES, "")
        answer = best_choices(menus, allowed, problem.hardware)
        if answer is None:
            break
        actions = [
            a for item, choice in zip(menus, answer[1], strict=True) for a in actions_for(problem, item.block, choice.label)
        ]
        candidate = _try("the dynamic program's mix", actions, problem)
        found.append(candidate)
        excess = candidate.outcome.peak[problem.home] - budget
        if excess <= 0:
            break
        allowed -= excess
    return found


def _fallbacks(problem: Problem, menus: Sequence[Item]) -> list[_Candidate]:
    """What anyone would try by hand; the search must not lose to them."""
    found = []
    for label in ("recompute", "recompute + offload", "offload"):
        blocks = [i.block for i in menus if any(c.label == label for c in i.choices)]
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
            verdict = f"would take {format_seconds(slower)} more" if slower >= 0 else "leaves the allocator too little room"
            verdict = verdict if fits else "does not fit"
            reasons.append(f"{other.label} ({format_bytes(other.outcome.peak[problem.home])}) {verdict}")
    return list(dict.fromkeys(reasons))
