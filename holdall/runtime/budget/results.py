"""Measured results of a run by step, and the plan's prediction for such steps.

A harness may use several plans. Results of a plan cover the steps that ran under it since model states were last placed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdall.runtime.budget.meter import Meter
from holdall.types import Moment, Outcome, Plan

_MOMENTS = 1200  # most points of a timeline, roughly


class Results:
    """Remembers the plan of every step; the measurements are read from the meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._since = 0  # steps that were made under earlier plans
        self._made_under: list[Plan] = []  # of every step
        self._traffic: list[dict[str, int]] = []  # likewise: link -> bytes
        self._copied: Mapping[str, int] | None = None  # link -> bytes so far, when they were last looked at

    def begin_step(self, copied: Mapping[str, int]) -> None:
        """`copied`: link -> bytes so far."""
        if self._copied is None:
            self._copied = copied
        self.add_copies(copied)

    def add_step(self, plan: Plan, copied: Mapping[str, int]) -> None:
        """A step under this plan has ended, and the meter knows of it. `copied`: as for `begin_step`."""
        self._made_under.append(plan)
        self._traffic.append({})
        self.add_copies(copied)

    def add_copies(self, copied: Mapping[str, int]) -> None:
        """Add the copies since the last look to the last step: a host update may still be under way when its step ends."""
        if self._copied is None or len(self._traffic) <= self._since:
            return
        step = self._traffic[-1]
        for link, size in copied.items():
            step[link] = step.get(link, 0) + size - self._copied.get(link, 0)
        self._copied = copied

    def begin_anew(self) -> None:
        """Model states were placed anew: ignore earlier steps, even under the same plan."""
        self._since = len(self._meter.peaks())
        self._copied = None

    def seconds(self, plan: Plan) -> list[float]:
        return self._of(plan, self._meter.seconds())

    def peaks(self, plan: Plan) -> list[int]:
        return self._of(plan, self._meter.peaks())

    def traffic(self, plan: Plan) -> dict[str, int]:
        """Bytes per link and step, on average: of a host update, copies may fall into the next step."""
        steps = self._of(plan, self._traffic)
        total: Counter[str] = sum((Counter(step) for step in steps), Counter())
        return {link: round(size / len(steps)) for link, size in total.items()}

    def _of(self, plan: Plan, of_steps: list[Any]) -> list[Any]:
        under = zip(of_steps[self._since :], self._made_under[self._since :], strict=False)
        return [value for value, made_under in under if made_under is plan]

    def measured(self, plan: Plan, home: str, elsewhere: Mapping[str, int]) -> Outcome | None:
        """The measured outcome; None before the first whole step. Seconds are the median of the steps after the first.

        `home`: the tier that the meter measures. `elsewhere`: peaks of the others.
        """
        every = self.seconds(plan)
        if not every:
            return None
        seconds = statistics.median(every[1:] or every)
        peak = {home: max(self.peaks(plan)), **elsewhere}
        return Outcome(
            source="measured",
            seconds=seconds,
            peak=peak,
            reserved=self._meter.reserved(),
            traffic=self.traffic(plan),
            timeline=self._timeline(),
        )

    def _timeline(self) -> tuple[Moment, ...]:
        """Memory over time in the last step, thinned out by taking the maximum of neighbouring points."""
        curve = self._meter.curve()
        width = max(1, len(curve) // _MOMENTS)
        return tuple(
            Moment(at=at, where="", total=total)
            for at, total in (max(curve[i : i + width], key=lambda m: m[1]) for i in range(0, len(curve), width))
        )


def expect(plan: Plan, *, ahead: bool) -> Outcome:
    """The prediction for clipped steps or, with `ahead`, for steps whose speculative updates were right."""
    said, if_not = plan.predicted, plan.about.seconds_if_not_clipped
    if if_not is None or not ahead:
        return said
    stalled = max(0.0, (said.stall_seconds or 0.0) - (said.seconds - if_not))
    return replace(said, seconds=if_not, stall_seconds=stalled)
