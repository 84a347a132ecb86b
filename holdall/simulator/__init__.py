"""Schedule -> Outcome. One code path computes every peak; `check` recounts it naively in the tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdall.errors import OverBudget
from holdall.simulator.allocators import Expandable, make_allocator
from holdall.simulator.check import Illegal, check
from holdall.simulator.lifetimes import count_at_start
from holdall.simulator.lower import Lowering, close, lower
from holdall.simulator.pages import Churn, churn
from holdall.simulator.replay import replay
from holdall.types import Action, Outcome, Problem
from holdall.units import MiB

# Share of the limit left for pages of other streams and late kernels; with it, a 6 GiB plan predicts the halts of an H200.
_ASIDE, _AT_MOST = 0.01, 64 * MiB

__all__ = ["Illegal", "Lowering", "check", "close", "lower", "replay", "simulate"]


def simulate(
    problem: Problem,
    actions: Iterable[Action],
    *,
    full: bool = False,
    checked: bool = False,
    allocator: str | None = None,
    lowering: Lowering | None = None,
) -> Outcome:
    """The outcome of a step under these actions. `checked`: also verify it with the naive checker. `lowering`: a search's cache
    of schedules for this problem.
    """
    schedule = (lowering or Lowering(problem)).lower(actions)
    steps = close(schedule)
    limit = problem.limit(problem.home)
    try:  # an allocator limited to the budget releases cached memory before it fails, as the real one does
        made = make_allocator(allocator, limit=limit) if allocator else None
        outcome = replay(steps, schedule, problem.hardware, allocator=made, full=full)
        if type(made) is Expandable:
            outcome = _with_churn(
                outcome, churn(made.order, count_at_start(schedule), limit - min(_AT_MOST, int(_ASIDE * limit)))
            )
    except OverBudget:
        made = make_allocator(allocator or "ideal")
        outcome = replay(steps, schedule, problem.hardware, allocator=made, full=full)
    if checked:
        naive = check(steps, {**schedule.trace.tensors, **schedule.added}, problem.home, schedule.start)
        if naive != outcome.peak:
            raise Illegal(f"the simulator counts {outcome.peak}, the checker {naive}")
    return outcome


def _with_churn(outcome: Outcome, found: Churn) -> Outcome:
    stall = None if outcome.stall_seconds is None else outcome.stall_seconds + found.seconds
    return replace(
        outcome, seconds=outcome.seconds + found.seconds, stall_seconds=stall, churn=found.seconds, cramped=found.missing > 0
    )
