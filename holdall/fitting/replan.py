"""Plans activations around fixed actions: the placement of model states does not change between steps.

Used for other batch sizes than the sample's, and for the tightest plan, under which a step that ran out of memory is retried.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdall.planners.auto import Auto
from holdall.planners.auto.search import Search, usable
from holdall.planning.finish import finish, over_budget
from holdall.types import Action, Plan, Problem


def plan_around(problem: Problem, around: Sequence[Action], *, smallest: bool = False) -> Plan:
    """The fastest plan with these actions that fits, or the one with the smallest peak; `Infeasible` if that does not fit."""
    began = time.perf_counter()
    settled, less = tuple(around), usable(problem)
    search = Search(problem)
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
