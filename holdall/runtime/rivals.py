"""Plans that may be faster than the one that is on: tried by measurement, and kept only if they were.

After a few steps the measured time is held against what a rival is said to take: a plan made anew with costs corrected by what
was measured, where the prediction was off, and then the simple fallback. A rival that should be faster runs as many steps, and
whichever was faster stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from holdall.errors import HoldallError
from holdall.types import Plan
from holdall.units import format_seconds

WARM = 3  # steps that fill pools and caches, and are not counted
LOOK = 3  # steps that are
_SLACK = 1.05  # a plan is slower only if it is so by more than what steps differ anyway

Correct = Callable[[Any, float], Plan | None]  # (harness, seconds of a step) -> a plan made from that; None: no need


class Rivals:
    """`correct`: makes a plan from what was measured. `fallback`: what anyone would do."""

    def __init__(self, fallback: Plan | None, correct: Correct | None = None) -> None:
        self._waiting: list[tuple[str, Callable[[Any, float], Plan | None]]] = []
        if correct is not None:
            self._waiting.append(("a plan made from what was measured", correct))
        if fallback is not None:
            self._waiting.append((f"the fallback `{fallback.planner}`", lambda *_: fallback))
        self._trial: tuple[str, Plan, float] | None = None  # what is tried, instead of which plan, and what that took

    def after_step(self, harness: Any, note: Callable[[str], None]) -> None:
        is_idle = self._trial is None and not self._waiting
        if is_idle or len(harness.step_peaks) < WARM + LOOK:
            return
        seconds = statistics.median(harness.step_seconds[-LOOK:])
        if self._trial is not None:
            self._judge(harness, seconds, note)
            return
        while self._waiting and self._trial is None:
            what, make = self._waiting.pop(0)
            rival = _made(make, harness, seconds)
            if rival is None or rival.actions == harness.plan.actions or seconds <= _SLACK * rival.predicted.seconds:
                continue
            expected = format_seconds(rival.predicted.seconds)
            note(f"a step takes {format_seconds(seconds)} where {what} should take {expected}: trying it")
            self._trial = what, harness.plan, seconds
            harness.switch(rival)

    def _judge(self, harness: Any, seconds: float, note: Callable[[str], None]) -> None:
        assert self._trial is not None
        what, before, first = self._trial
        self._trial = None
        if seconds < first:
            note(f"{what} stays: {format_seconds(seconds)} a step, {format_seconds(first)} before")
        else:
            note(f"{what} is no faster ({format_seconds(seconds)} a step): back to `{before.planner}`")
            harness.switch(before)


def _made(make: Correct, harness: Any, seconds: float) -> Plan | None:
    try:
        return make(harness, seconds)
    except HoldallError:  # nothing fits, or nothing can be said: the run goes on as it is
        return None
