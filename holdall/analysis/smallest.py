"""The smallest budget with a plan, or with one that is fast enough: bisection with a plan at every trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdall.errors import Infeasible, InvalidInput
from holdall.types import Plan, Progress
from holdall.types.plan import silent
from holdall.units import format_bytes

PlanFor = Callable[[int], Plan]
"""bytes of device memory -> a plan; raises `Infeasible` if there is none."""


@dataclass(frozen=True, kw_only=True)
class Smallest:
    budget: int
    plan: Plan
    fastest: Plan  # with all the memory there is
    below: int  # a budget that was tried and is too small, within `grain` of the fastest plan's peak
    tried: int  # number of plans made

    @property
    def speed(self) -> float:
        """Speed relative to the fastest plan."""
        return self.fastest.predicted.seconds / self.plan.predicted.seconds if self.plan.predicted.seconds else 1.0


def needed(plan: Plan) -> int:
    """The smallest budget for this plan: its peak, or the allocator's reserved bytes if known."""
    return max(next(iter(plan.predicted.peak.values())), plan.predicted.reserved or 0)


def smallest_budget(
    plan_for: PlanFor, *, most: int, keep_speed: float | None = None, grain: float = 0.01, progress: Progress = silent
) -> Smallest:
    """The smallest budget up to `most` that has a plan. `keep_speed`: one that keeps this share of the fastest plan's speed.

    `grain`: how close to the answer a too small budget must have been tried, as a share of the fastest plan's peak.
    """
    if keep_speed is not None and not 0 < keep_speed <= 1:
        raise InvalidInput(f"the share of speed to keep is {keep_speed}", hint="use one above 0 and at most 1, such as 0.9")
    progress("planning with all the memory", 0, 0, "")
    fastest = plan_for(most)
    slowest = fastest.predicted.seconds / keep_speed if keep_speed else float("inf")
    enough: dict[int, Plan] = {most: fastest}
    guesses: list[int] = []  # budgets that refusals named as sufficient
    tried = 1

    def is_enough(budget: int) -> bool:
        nonlocal tried
        progress(f"trying {format_bytes(budget)}", tried, 0, f"{format_bytes(min(enough))} is enough")
        tried += 1
        try:
            made = plan_for(budget)
        except Infeasible as error:
            guesses.extend([error.smallest] if error.smallest else [])
            return False
        if made.predicted.seconds > slowest:
            return False
        enough[budget] = made
        return True

    step = max(1, int(needed(fastest) * grain))
    low, high = 1, most
    if is_enough(low):
        raise AssertionError("a plan for one byte")
    for guess in (needed(fastest), *guesses[:1]):  # usually right, which saves most of the bisection
        if low < guess < high:
            low, high = (low, guess) if is_enough(guess) else (guess, high)
    while high - low > step:
        below = high - step if low == 1 else (low + high) // 2  # just below a guess first: often nothing fits there
        low, high = (low, below) if is_enough(below) else (below, high)
    return Smallest(budget=high, plan=enough[high], fastest=fastest, below=low, tried=tried)
