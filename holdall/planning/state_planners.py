"""What planners of states that leave blocks to the user share: what is done about blocks, which units may move, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdall.actions.place import Place, states_stay
from holdall.actions.place.schedule import read_by_hand
from holdall.actions.recompute import Recompute
from holdall.planning.finish import over_budget
from holdall.planning.segments import runs
from holdall.types import Action, Outcome, Problem, Trace, Unit

NOTHING = "everything fits: nothing needs to be done"


def treatments(problem: Problem, recompute: bool | None) -> list[list[Action]]:
    """What may be done about blocks: nothing, every block run again, or first the one and then the other."""
    trace = problem.trace
    again: list[Action] = [Recompute.of(trace, [b]) for row in runs(trace) for b in row if _holds(trace, b.saves)]
    if recompute is not None:
        return [again if recompute else []]
    return [[], again] if again and problem.permits(Recompute) else [[]]


def _holds(trace: Trace, saves: Sequence[int]) -> int:
    return sum(trace.tensors[trace.saves[n].tensor].nbytes for n in saves)


def places_states(problem: Problem) -> bool:
    return problem.permits(Place) and problem.hardware.far is not None and bool(movable(problem.trace))


def movable(trace: Trace) -> list[Unit]:
    """Units that may be updated on the host: trained ones, and frozen ones of which the host would hold a wider copy."""
    by_hand = read_by_hand(trace)
    is_narrow = trace.about.precision is not None
    return [u for u in trace.units if u.name not in by_hand and (u.numel or is_narrow)]


def missing_bytes(problem: Problem, outcome: Outcome) -> int:
    return sum(over_budget(problem, outcome).values())


def farthest(problem: Problem) -> str:
    """The tier that is farthest from the device."""
    return problem.hardware.others[-1].name


def place_in_tier(place: Place, problem: Problem, tier: str, *, stretch: int | None = None, buffers: int = 3) -> Place:
    """The same placement with all that it takes off the device in this tier: weights, gradients, masters and states.

    The host updates states there in stretches, of which `buffers` are in host memory. States that cannot be divided stay on the
    host.
    """
    if problem.other(tier) == problem.other():
        return place
    away = tuple((unit, tier) for unit, _, update in place.units if update != "device")
    divided = {u.name for u in problem.trace.units if u.grads and not states_stay(problem.trace, u)}
    states = tuple((unit, tier) for unit, _, update in place.units if update == "host" and unit in divided)
    return replace(place, elsewhere=away, states=states, stretch=stretch or place.stretch, buffers=buffers, ahead=False)


def update_moment(problem: Problem) -> str:
    """When the host updates, where a paper lets it begin as gradients come: as early as the loop permits."""
    if not problem.reads_gradients and problem.accumulate == 1:
        return "backward"
    return "overlap_forward" if problem.hardware.overlap else "step"
