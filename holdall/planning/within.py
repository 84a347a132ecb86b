"""Planners with a memory model of their own: the model proposes, the simulator judges.

Where a proposal does not fit by the simulator, the model is told that the device has less. The most memory with which it
proposes what fits is found by bisection, so a looser budget never gives less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdall.actions.place import Place
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.planning.state_planners import NOTHING, places_states, treatments
from holdall.types import Action, Plan, Planner, Problem

_FINEST = 1 << 12  # of the budget: the smallest difference that is looked into


class Proposal(NamedTuple):
    """Where a planner's own model puts the states, given some bytes of the device."""

    place: Place | None
    why: tuple[str, ...] = ()


Propose = Callable[[Sequence[Action], int], Proposal]  # (actions on blocks, bytes of the device) -> proposal


class _Judged(NamedTuple):
    missing: dict[str, int]
    actions: list[Action]
    why: list[str]


def finish_within(
    planner: Planner, problem: Problem, propose: Propose, *, recompute: bool | None, began: float, always: bool = False
) -> Plan:
    """The plan that the planner's model proposes, with the most memory with which that fits.

    Nothing is done if plain training fits, unless `always`. `recompute`: every block, or none; None: every block where nothing
    fits without.
    """
    if not recompute and not always and not over_budget(problem, outcome_or_never(problem, [])):
        return finish(planner, problem, [], why=[NOTHING], began=began)
    tried: list[_Judged] = []
    for blocks in treatments(problem, recompute):
        found = _most(problem, propose, blocks)
        if not found.missing:
            return finish(planner, problem, found.actions, why=found.why, began=began)
        tried.append(found)
    least = min(tried, key=lambda t: sum(t.missing.values()))
    return finish(planner, problem, least.actions, why=least.why, began=began)


def _most(problem: Problem, propose: Propose, blocks: Sequence[Action]) -> _Judged:
    again = [f"{len(blocks)} blocks are recomputed, each from its input"] if blocks else []

    def judge(proposal: Proposal) -> _Judged:
        actions = [*blocks, *([proposal.place] if proposal.place is not None else [])]
        missing = over_budget(problem, outcome_or_never(problem, actions))
        return _Judged(missing, actions, [*proposal.why, *again])

    if not places_states(problem):
        return judge(Proposal(None))
    limit = problem.limit(problem.home)
    above, below = propose(blocks, limit), propose(blocks, 0)
    best = judge(above)
    if not best.missing:
        return best
    best = judge(below)
    low, high = 0, limit
    while not best.missing and high - low > max(1, limit // _FINEST) and above.place != below.place:
        middle = (low + high) // 2
        proposal = propose(blocks, middle)
        judged = judge(proposal) if proposal.place != below.place else best
        if judged.missing:
            high, above = middle, proposal
        else:
            low, below, best = middle, proposal, judged
    return best
