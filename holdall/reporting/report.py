"""The last of the four nouns: a plan, its prediction, and the measurement.

Predicted and measured have the same type. Each output format has its own file (`text`, `html`, `chrome`); they all read the
comparison from `Report.rows`, so they cannot disagree about a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdall.reporting.chrome import chrome_trace
from holdall.reporting.html import render_html
from holdall.reporting.text import report_text, tier_label
from holdall.types import BlockRow, Outcome, Plan
from holdall.types._json import pack, write_text
from holdall.units import format_bytes, format_seconds

FORMAT = "holdall-report-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the comparison. A side is None if that figure is unknown."""

    label: str
    show: Callable[[float], str]
    predicted: float | None
    measured: float | None
    judged: bool = True  # False: too small or too noisy for a percentage
    limit: int | None = None  # the budget for it; None: it has none

    @property
    def said(self) -> str:
        return "--" if self.predicted is None else self.show(self.predicted)

    @property
    def seen(self) -> str:
        return "--" if self.measured is None else self.show(self.measured)

    @property
    def error(self) -> float | None:
        """The error of the prediction as a share of the measured value; None: not meaningful."""
        if not self.judged or self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`print(report)` shows the comparison; `report.save("run.html")` writes the page with the memory timeline."""

    plan: Plan
    predicted: Outcome
    measured: Outcome | None  # None: the plan has not been run
    steps: int  # number of measured steps
    blocks: tuple[BlockRow, ...] = ()
    notes: tuple[str, ...] = ()  # warnings for the reader
    parity: str = ""  # a sentence comparing it with the unplanned model; empty: not compared
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> str:
        """The tier that computes: the first one named."""
        return next(iter(self.predicted.peak), next(iter(self.plan.budget), "gpu"))

    @property
    def model(self) -> str:
        """The model's name if recorded; otherwise empty."""
        return str(self.environment.get("model") or self.plan.about.model)

    @property
    def latest(self) -> Outcome:
        """The best known outcome of the step: measured if it ran, otherwise predicted."""
        return self.measured or self.predicted

    def tier_label(self, tier: str) -> str:
        return tier_label(tier, self.home)

    def rows(self) -> tuple[Row, ...]:
        """The comparison, line by line."""
        said, seen = self.predicted, self.measured
        tiers = dict.fromkeys([*said.peak, *(seen.peak if seen else ())])
        rows = [
            Row(
                label=f"peak {self.tier_label(tier)}",
                show=format_bytes,
                predicted=said.peak.get(tier),
                measured=seen.peak.get(tier) if seen else None,
                limit=self.plan.budget.get(tier),
            )
            for tier in tiers
        ]
        rows += [
            self._row("step", "seconds", format_seconds),
            self._row("recomputed", "recompute_seconds", format_seconds, judged=False),
            self._row("waiting", "stall_seconds", format_seconds, judged=False),
        ]
        if said.reserved is not None or (seen and seen.reserved is not None):
            rows.append(self._row("reserved", "reserved", format_bytes))
        return tuple(rows)

    def _row(self, label: str, name: str, show: Callable[[float], str], *, judged: bool = True) -> Row:
        seen = getattr(self.measured, name) if self.measured else None
        return Row(label=label, show=show, predicted=getattr(self.predicted, name), measured=seen, judged=judged)

    @property
    def fits(self) -> bool | None:
        """Did every tier stay within its budget? None: no budget was set, or nothing was measured."""
        return None if self.measured is None else self._is_within

    @property
    def _is_within(self) -> bool | None:
        known = self.latest.peak.keys() & self.plan.budget.keys()
        return all(self.latest.peak[t] <= self.plan.budget[t] for t in known) if known else None

    @property
    def verdict(self) -> str:
        """One sentence: does it fit?"""
        if self._is_within is None:
            return "no budget was set"
        peak, budget = self.latest.peak, self.plan.budget
        tier = max(peak.keys() & budget.keys(), key=lambda t: (peak[t] / max(budget[t], 1), t))
        where = self.tier_label(tier)
        if not self._is_within:
            excess = f"{format_bytes(peak[tier] - budget[tier])} over the {where} budget"
            return excess if self.measured else f"nothing was measured; predicted {excess}"
        share = f"{format_bytes(peak[tier])} of {format_bytes(budget[tier])} {where}"
        return f"fits: {share}" if self.measured else f"nothing was measured; should fit: {share}"

    def to_json(self) -> dict[str, Any]:
        """Plain data. Values in `environment` without a JSON form (a device, a path) become text."""
        return {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "predicted": pack(self.predicted),
            "measured": pack(self.measured),
            "steps": self.steps,
            "blocks": pack(self.blocks),
            "notes": list(self.notes),
            "parity": self.parity,
            "environment": json.loads(json.dumps(pack(self.environment), default=str)),
        }

    def to_chrome(self) -> dict[str, Any]:
        """Prediction and measurement as two processes of one Chrome trace, one above the other."""
        trace = chrome_trace(self.predicted, "predicted")
        if self.measured:
            trace["traceEvents"] += chrome_trace(self.measured, "measured", pid=2)["traceEvents"]
        return trace

    def __str__(self) -> str:
        return report_text(self)

    def save(self, path: str | Path) -> None:
        """Write the report, completely or not at all, in the format of the suffix: .html, .trace.json (Chrome), .json;
        otherwise text.
        """
        name = Path(path).name.lower()
        if name.endswith(".trace.json"):
            text = json.dumps(self.to_chrome(), separators=(",", ":"))
        elif name.endswith(".json"):
            text = json.dumps(self.to_json(), separators=(",", ":"))
        elif name.endswith((".html", ".htm")):
            text = render_html(self)
        else:
            text = f"{self}\n"
        write_text(path, text)
