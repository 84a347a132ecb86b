"""Tries plans that may be faster than the active one, and keeps them only if they are.

After a few steps, the measured time is compared with rivals' predictions: first a plan made again with measured costs, if the
prediction was off, then the simple fallbacks (checkpoint every block; optimizer on the host). The corrected plan is made in
another process while the run continues. A rival that should be faster runs for as many steps, and the faster one stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from holdall.errors import HoldallError, Infeasible
from holdall.types import Plan
from holdall.units import format_seconds

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

WARM = 3  # warm-up steps, not counted
LOOK = 3  # measured steps
_SLACK = 1.05  # a plan must be slower by more than the noise


class PendingTrial(Protocol):
    """A plan that is being made in another process."""

    def done(self) -> bool: ...

    def result(self) -> Plan | None: ...

    def close(self) -> None: ...


Correct = Callable[
    [Any, float], PendingTrial | Plan | None
]  # (harness, seconds per step) -> a corrected plan; None: not needed


class PlanTrials:
    """`correct`: makes a plan from measured times. `fallbacks`: simple plans."""

    def __init__(self, fallbacks: Sequence[Plan] = (), correct: Correct | None = None) -> None:
        self._waiting: list[tuple[str, Correct]] = []
        if correct is not None:
            self._waiting.append(("a plan corrected by measured times", correct))
        for fallback in sorted(fallbacks, key=lambda plan: plan.predicted.seconds):
            self._waiting.append((f"the fallback `{fallback.planner}`", partial(_given, fallback)))
        self._made: tuple[str, PendingTrial, Plan] | None = None  # (name, plan being made, plan it was requested under)
        self._trial: tuple[str, Plan, float] | None = None  # (name of the rival, previous plan, its seconds)

    def after_step(self, harness: Harness, note: Callable[[str], None]) -> None:
        is_idle = self._trial is None and self._made is None and not self._waiting
        if is_idle or len(harness.step_peaks) < WARM + LOOK:
            return
        if self._trial is None and self._made is not None and not self._made[1].done():
            return  # still being made; reading step times would wait for the device
        seconds = statistics.median(harness.step_seconds[-LOOK:])
        if self._trial is not None:
            self._judge(harness, seconds, note)
            return
        while self._trial is None and (self._made is not None or self._waiting):
            if self._made is not None:
                what, made, under = self._made
                if not made.done():
                    return
                self._made = None
                rival = _result_of(made, note) if harness.plan is under else None
            else:
                what, make = self._waiting.pop(0)
                found = _asked(make, harness, seconds, note)
                if found is not None and not isinstance(found, Plan):
                    said = format_seconds(harness.expected.seconds)
                    note(f"a step takes {format_seconds(seconds)} ({said} predicted): making {what} in the background")
                    self._made = what, found, harness.plan
                    continue
                rival = found
            if rival is not None and rival.actions != harness.plan.actions and seconds > _SLACK * rival.predicted.seconds:
                self._try(what, rival, harness, seconds, note)

    def _try(self, what: str, rival: Plan, harness: Harness, seconds: float, note: Callable[[str], None]) -> None:
        expected = format_seconds(rival.predicted.seconds)
        note(
            f"a step takes {format_seconds(seconds)}, and {what} should take {expected}: trying it; "
            "the next step takes longer, since model states move"
        )
        self._trial = what, harness.plan, seconds
        harness.switch(rival)

    def close(self) -> None:
        """The run is over."""
        made, self._made, self._waiting = self._made, None, []
        if made is not None:
            made[1].close()

    def _judge(self, harness: Harness, seconds: float, note: Callable[[str], None]) -> None:
        assert self._trial is not None
        what, before, first = self._trial
        self._trial = None
        if seconds < first:
            note(f"{what} stays: {format_seconds(seconds)} a step, {format_seconds(first)} before")
        else:
            note(f"{what} is no faster ({format_seconds(seconds)} a step): back to `{before.planner}` with the next step")
            harness.switch(before)


def _given(plan: Plan, *_: Any) -> Plan:
    return plan


def _asked(make: Correct, harness: Harness, seconds: float, note: Callable[[str], None]) -> PendingTrial | Plan | None:
    try:
        return make(harness, seconds)
    except Infeasible:  # nothing fits: the run continues with its plan
        return None
    except HoldallError as error:
        note(error.fact)
        return None


def _result_of(made: PendingTrial, note: Callable[[str], None]) -> Plan | None:
    try:
        return made.result()
    except HoldallError as error:
        note(error.fact)
        return None
