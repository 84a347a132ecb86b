"""What a tier has no room for moves on to the next one.

Offloaded blocks move first, the first of the chain before later ones: they are wanted back last, so a slower link has the most
time for them. Then the weights and gradients of units that the host updates, the last units first, since the next forward wants
them last; a tier takes them if the host can work on its memory. As few move as lets the tier be within its budget; the whole
step is simulated for every number that is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.planning.finish import over_budget
from holdall.registry import member_class, member_names
from holdall.types import Action, Outcome, Problem

Actions = tuple[Action, ...]


def spill(problem: Problem, actions: Actions, outcome: Callable[[Actions], Outcome | None]) -> Actions:
    """The same actions with as few of them moved on as lets every tier be within its budget, as far as that goes."""
    for tier, further in pairwise(other.name for other in problem.hardware.others):
        for find in (_offloads, _units):
            before = outcome(actions)
            if before is None or tier not in over_budget(problem, before):
                break
            actions = _fewest(*find(problem, actions, tier, further), partial(_has_room, problem, tier, outcome))
    return actions


def _has_room(problem: Problem, tier: str, outcome: Callable[[Actions], Outcome | None], actions: Actions) -> bool:
    found = outcome(actions)
    return found is not None and tier not in over_budget(problem, found)


def _offloads(problem: Problem, actions: Actions, tier: str, further: str) -> tuple[int, Callable[[int], Actions]]:
    """How many offloaded blocks could move on, and the actions with so many of them moved."""
    movable = [a for a in actions if isinstance(a, Offload) and problem.other(a.tier) == tier]

    def moved(count: int) -> Actions:
        those = set(movable[:count])
        return tuple(replace(a, tier=further) if isinstance(a, Offload) and a in those else a for a in actions)

    return len(movable), moved


def _units(problem: Problem, actions: Actions, tier: str, further: str) -> tuple[int, Callable[[int], Actions]]:
    """The same for units."""
    place = next((a for a in actions if isinstance(a, Place)), None)
    if place is None or not _keeps_states(further):
        return 0, lambda _: actions
    lies = dict(place.elsewhere)
    movable = [
        unit for unit, _, update in reversed(place.units) if update == "host" and problem.other(lies.get(unit, "")) == tier
    ]

    def moved(count: int) -> Actions:
        elsewhere = tuple({**lies, **dict.fromkeys(movable[:count], further)}.items())
        return tuple(replace(place, elsewhere=elsewhere, ahead=False) if a is place else a for a in actions)

    return len(movable), moved


def _keeps_states(tier: str) -> bool:
    """Whether the host's processors can work on what lies there."""
    return tier in member_names("tiers") and hasattr(member_class("tiers", tier), "memory")


def _fewest(most: int, moved: Callable[[int], Actions], fits: Callable[[Actions], bool]) -> Actions:
    """The least number moved that fits, where more never fit worse; all of them, if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(moved(middle)) else (middle + 1, high)
    return moved(high)
