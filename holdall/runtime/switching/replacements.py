"""Which plan replaces one under which a step ran out of memory.

The failed step is retried under the tightest plan. The peak of that retry, less the plan's prediction, is what the loop holds
besides the traced step: a copy of the weights, kept outputs. The next step begins with a plan made for the rest of the budget.
If these bytes do not explain the failure, the plan stays; after a second failure, the tightest plan replaces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdall.errors import HoldallError
from holdall.types import Plan
from holdall.units import format_bytes

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_TWICE = 2  # failures after which a plan is not used again


class Tighten(Protocol):
    """Makes a plan for the same step with the same placement of states; None: there is none."""

    def __call__(self, plan: Plan, held: int | None = None, /) -> Plan | None:
        """The plan with the smallest peak or, with `held`, the fastest that leaves these bytes to the loop."""
        ...


class Replacements:
    """`tighten`: makes the plans; None: no step is retried."""

    def __init__(self, tighten: Tighten | None) -> None:
        self._tighten = tighten
        self._failures: dict[int, int] = {}  # by id of the plan
        self._tightest: dict[int, tuple[Plan, Plan | None]] = {}  # by id; keeps the plan, so that its id stays unique
        self._refitted: dict[int, Plan] = {}  # by id: the plan that leaves the loop its bytes
        self._held: dict[int, int] = {}  # by id of a refitted plan: bytes that it leaves to the loop
        self._failed: tuple[Plan, Plan, int] | None = None  # (plan, the one of the retry, steps before); until measured

    def tightest(self, plan: Plan) -> tuple[Plan | None, str]:
        """(the plan to retry under, or None and the reason)."""
        if self._tighten is None:
            return None, "this harness has no tighter plan (`holdall.fit` makes one, `holdall.apply` does not)"
        if id(plan) not in self._tightest:
            try:
                self._tightest[id(plan)] = plan, self._tighten(plan)
            except HoldallError as wrong:
                self._tightest[id(plan)] = plan, None
                return None, f"no tighter plan could be made: {wrong.fact}"
        found = self._tightest[id(plan)][1]
        return found, "" if found is not None else "the plan is already the tightest"

    def fail(self, plan: Plan, tightest: Plan, steps: int) -> bool:
        """The step after so many runs out of memory under this plan and is retried. Is the plan given up for the tightest?"""
        self._failures[id(plan)] = count = self._failures.get(id(plan), 0) + 1
        self._failed = plan, tightest, steps
        return count >= _TWICE

    def instead_of(self, plan: Plan, harness: Harness) -> Plan:
        """The plan to begin a forward with."""
        if self._failed is not None:
            failed, tightest, before = self._failed
            if len(harness.all_peaks) == before:
                return tightest  # the step that failed goes on
            self._failed = None
            self._refit(failed, tightest, harness)
        while id(plan) in self._refitted:
            plan = self._refitted[id(plan)]
        tightest_of = self._tightest[id(plan)][1] if self._failures.get(id(plan), 0) >= _TWICE else None
        return tightest_of if tightest_of is not None else plan

    def _refit(self, failed: Plan, tightest: Plan, harness: Harness) -> None:
        """Make the plan that leaves the loop the bytes that it was measured to hold."""
        home = next(iter(tightest.budget))
        held = harness.all_peaks[-1] - tightest.predicted.peak[home]
        more = held - self._held.get(id(failed), 0)  # than the failed plan left
        if self._tighten is None or failed.predicted.peak[home] + more <= failed.budget[home]:
            return
        try:
            made = self._tighten(failed, held)
        except HoldallError:  # nothing fits beside the loop's bytes but the tightest plan
            return
        if made is None:
            return
        self._refitted[id(failed)], self._held[id(made)] = made, held
        loop = f"the loop holds {format_bytes(held)} besides the step"
        harness.note()(f"{loop}: the next steps run under a plan that leaves room for it ({made.summary()})")
