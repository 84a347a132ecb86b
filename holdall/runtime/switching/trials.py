"""Plans that may be faster than the one that is on: tried by measurement, and kept only if they were.

After a few steps the measured time is held against what a rival is said to take: a plan made anew with costs corrected by what
was measured, where the prediction was off, and then what anyone would do (checkpoint every block; optimizer on the host). The
first is made beside the run, which goes on until
it is there. A rival that should be faster runs as many steps, and whichever was faster stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from holdall.errors import HoldallError, Infeasible
from holdall.types import Plan
from holdall.units import format_seconds

WARM = 3  # steps that fill pools and caches, and are not counted
LOOK = 3  # steps that are
_SLACK = 1.05  # a plan is slower only if it is so by more than what steps differ anyway


class Pending(Protocol):
    """A plan that is being made beside the run."""

    def done(self) -> bool: ...

    def result(self) -> Plan | None: ...

    def close(self) -> None: ...


Correct = Callable[[Any, float], Pending | Plan | None]  # (harness, seconds of a step) -> a plan from that; None: no need


class PlanTrials:
    """`correct`: makes a plan from what was measured. `fallbacks`: what anyone would do."""

    def __init__(self, fallbacks: Sequence[Plan] = (), correct: Correct | None = None) -> None:
        self._waiting: list[tuple[str, Correct]] = []
        if correct is not None:
            self._waiting.append(("a plan made from what was measured", correct))
        for fallback in sorted(fallbacks, key=lambda plan: plan.predicted.seconds):
            self._waiting.append((f"the fallback `{fallback.planner}`", partial(_given, fallback)))
        self._made: tuple[str, Pending, Plan] | None = None  # what is being made, and under which plan it was asked for
        self._trial: tuple[str, Plan, float] | None = None  # what is tried, instead of which plan, and what that took

    def after_step(self, harness: Any, note: Callable[[str], None]) -> None:
        is_idle = self._trial is None and self._made is None and not self._waiting
        if is_idle or len(harness.step_peaks) < WARM + LOOK:
            return
        if self._trial is None and self._made is not None and not self._made[1].done():
            return  # it goes on beside the run; asking for the time of a step would wait for the device
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
                    note(f"a step takes {format_seconds(seconds)}, {said} was said: {what} is on its way, beside the run")
                    self._made = what, found, harness.plan
                    continue
                rival = found
            if rival is not None and rival.actions != harness.plan.actions and seconds > _SLACK * rival.predicted.seconds:
                self._try(what, rival, harness, seconds, note)

    def _try(self, what: str, rival: Plan, harness: Any, seconds: float, note: Callable[[str], None]) -> None:
        expected = format_seconds(rival.predicted.seconds)
        note(
            f"a step takes {format_seconds(seconds)} where {what} should take {expected}: trying it; "
            "the next step takes longer, since model states move"
        )
        self._trial = what, harness.plan, seconds
        harness.switch(rival)

    def close(self) -> None:
        """The run is over."""
        made, self._made, self._waiting = self._made, None, []
        if made is not None:
            made[1].close()

    def _judge(self, harness: Any, seconds: float, note: Callable[[str], None]) -> None:
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


def _asked(make: Correct, harness: Any, seconds: float, note: Callable[[str], None]) -> Pending | Plan | None:
    try:
        return make(harness, seconds)
    except Infeasible:  # nothing fits, or nothing can be said: the run goes on as it is
        return None
    except HoldallError as error:
        note(error.fact)
        return None


def _result_of(made: Pending, note: Callable[[str], None]) -> Plan | None:
    try:
        return made.result()
    except HoldallError as error:
        note(error.fact)
        return None
