"""A plan that turns out slower than the simple fallback is given up for it, by measurement and not by belief.

After a few steps the measured time is held against what the fallback is said to take. If the plan is slower, the fallback runs
as many steps, and whichever was faster stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from holdall.types import Plan
from holdall.units import format_seconds

WARM = 3  # steps that fill pools and caches, and are not counted
LOOK = 3  # steps that are
_SLACK = 1.05  # a plan is slower only if it is so by more than what steps differ anyway


class StepBack:
    def __init__(self, plan: Plan, fallback: Plan) -> None:
        self._plan = plan
        self._fallback = fallback
        self._first: float | None = None  # seconds of the plan, once the fallback is on trial
        self._is_over = fallback.actions == plan.actions

    def after_step(self, harness: Any, note: Callable[[str], None]) -> None:
        if self._is_over or len(harness.step_peaks) < WARM + LOOK:
            return
        seconds = statistics.median(harness.step_seconds[-LOOK:])
        if self._first is None:
            expected = self._fallback.predicted.seconds
            if seconds <= _SLACK * expected:
                self._is_over = True
                return
            self._first = seconds
            note(
                f"a step takes {format_seconds(seconds)} where the fallback `{self._fallback.planner}` should take "
                f"{format_seconds(expected)}: trying it"
            )
            harness.switch(self._fallback)
            return
        self._is_over = True
        if seconds < self._first:
            before = format_seconds(self._first)
            note(f"stepped back to `{self._fallback.planner}`: {format_seconds(seconds)} a step, {before} before")
        else:
            note(f"the fallback is no faster ({format_seconds(seconds)} a step): back to `{self._plan.planner}`")
            harness.switch(self._plan)
