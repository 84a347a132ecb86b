"""Schedule -> Outcome. One code path computes every peak; `check` recounts it naively in the tests."""

from __future__ import annotations

from collections.abc import Iterable

from holdall.errors import OverBudget
from holdall.simulator.allocators import make_allocator
from holdall.simulator.check import Illegal, check
from holdall.simulator.lower import close, lower
from holdall.simulator.replay import replay
from holdall.types import Action, Outcome, Problem

__all__ = ["Illegal", "check", "close", "lower", "replay", "simulate"]


def simulate(
    problem: Problem, actions: Iterable[Action], *, full: bool = False, checked: bool = False, allocator: str | None = None
) -> Outcome:
    """What a step costs under these actions. `checked`: also walk it with the naive checker."""
    schedule = lower(problem, actions)
    steps = close(schedule)
    try:  # with the budget as its limit, an allocator gives cached memory back before it fails, as the real one does
        made = make_allocator(allocator, limit=problem.limit(problem.home)) if allocator else None
        outcome = replay(steps, schedule, problem.hardware, allocator=made, full=full)
    except OverBudget:
        made = make_allocator(allocator or "ideal")
        outcome = replay(steps, schedule, problem.hardware, allocator=made, full=full)
    if checked:
        naive = check(steps, {**problem.trace.tensors, **schedule.added}, problem.home, schedule.start)
        if naive != outcome.peak:
            raise Illegal(f"the simulator counts {outcome.peak}, the checker {naive}")
    return outcome
