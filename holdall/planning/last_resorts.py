"""Plans with an action on the whole step that is tried only if nothing else fits (`Action.last_resorts`).

Such an action changes the ops of the step, and with them last bits. The other actions are planned on the changed step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from holdall.errors import Infeasible, Unsupported
from holdall.planning.finish import finish
from holdall.registry import member_classes
from holdall.types import Action, Plan, Planner, Problem
from holdall.units import format_bytes


def or_last_resort(planner: Planner, problem: Problem, make: Callable[[Problem], Plan]) -> Plan:
    """The plan that `make` finds; if none fits, the first with a last resort. `Infeasible` with the smallest budget of all."""
    began = time.perf_counter()
    try:
        return make(problem)
    except Infeasible as error:
        least = error
    without = "" if least.smallest is None else f": the smallest plan needs {format_bytes(least.smallest)}"
    for action in _offered(problem):
        try:
            made = make(problem.under([action]))
        except Infeasible as error:
            least = min(least, error, key=lambda e: (e.smallest is None, e.smallest or 0))
        except Unsupported:
            continue
        else:
            why = [f"nothing fits without `{action.name}`, which changes last bits{without}", *made.why]
            return finish(planner, problem, [action, *made.actions], why=why, began=began)
    raise least


def _offered(problem: Problem) -> Iterator[Action]:
    for action in member_classes("actions"):
        if problem.permits(action):
            yield from action.last_resorts(problem)
