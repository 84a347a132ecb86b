"""Tensors that exceed a tier's budget move on to the next tier.

Offloaded blocks move first, the earliest of the chain first: they are needed last, so a slower link has the most time for them.
Then, of units that the host updates, weights and gradients, masters and states, or both, whichever is fastest; the last units
first, since the next forward needs them last. A tier takes them if the host can work on its memory. As few move as the tier's
budget requires; the whole step is simulated for every number that is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from holdall.actions.offload import Offload
from holdall.actions.place import Place, states_stay
from holdall.planning.finish import over_budget
from holdall.registry import member_class, member_names
from holdall.types import Action, Outcome, Problem

Actions = tuple[Action, ...]


def spill(problem: Problem, actions: Actions, outcome: Callable[[Actions], Outcome | None]) -> Actions:
    """The same actions, with as few as possible moved on so that every tier is within its budget, if that can be reached."""
    for tier, further in pairwise(other.name for other in problem.hardware.others):
        fits = partial(_has_room, problem, tier, outcome)
        if outcome(actions) is not None and not fits(actions):
            actions = _fewest(*_offloads(problem, actions, tier, further), fits)
        if outcome(actions) is not None and not fits(actions):
            weights = _fewest(*_units(problem, actions, tier, further), fits)
            states = _fewest(*_states(problem, actions, tier, further), fits)
            both = _fewest(*_units(problem, states, tier, further), fits)
            ways = [way for way in dict.fromkeys((weights, states, both)) if fits(way)]
            actions = min(ways, key=lambda way: _seconds(outcome(way)), default=both)
    return actions


def _seconds(outcome: Outcome | None) -> float:
    return outcome.seconds if outcome is not None else float("inf")


def _has_room(problem: Problem, tier: str, outcome: Callable[[Actions], Outcome | None], actions: Actions) -> bool:
    found = outcome(actions)
    return found is not None and tier not in over_budget(problem, found)


def _offloads(problem: Problem, actions: Actions, tier: str, further: str) -> tuple[int, Callable[[int], Actions]]:
    """The number of offloaded blocks that could move on, and a function from a number moved to the actions."""
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


def _states(problem: Problem, actions: Actions, tier: str, further: str) -> tuple[int, Callable[[int], Actions]]:
    """The same for masters and states, which are then updated in stretches."""
    place = next((a for a in actions if isinstance(a, Place)), None)
    if place is None or tier != problem.other() or not _keeps_states(further):
        return 0, lambda _: actions
    lies = dict(place.states)
    can = {unit.name for unit in problem.trace.units if unit.grads and not states_stay(problem.trace, unit)}
    movable = [unit for unit, _, update in reversed(place.units) if update == "host" and unit in can - lies.keys()]

    def moved(count: int) -> Actions:
        states = tuple({**lies, **dict.fromkeys(movable[:count], further)}.items())
        return tuple(replace(place, states=states, ahead=False) if a is place else a for a in actions)

    return len(movable), moved


def _keeps_states(tier: str) -> bool:
    """Can the host's processors work on this tier's memory?"""
    return tier in member_names("tiers") and hasattr(member_class("tiers", tier), "memory")


def _fewest(most: int, moved: Callable[[int], Actions], fits: Callable[[Actions], bool]) -> Actions:
    """The actions with the least number moved that fits (more never fit worse); with all moved, if none fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(moved(middle)) else (middle + 1, high)
    return moved(high)
