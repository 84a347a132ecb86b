"""What was predicted of a rank, and what it was measured to be."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from holdall.pipelines.running.budget.metering import STEP, UPDATE, Meter
from holdall.pipelines.running.budget.saving import StageSaving
from holdall.reporting.report import Row
from holdall.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class PipeReport:
    """`print(report)` shows it; bytes are of this rank's device."""

    rank: int
    budget: int | None
    predicted: Mapping[str, int]  # part of a training step -> the most bytes in it
    measured: Mapping[str, int]  # of those that have been run
    held: tuple[int | None, int]  # what autograd holds at most: predicted, and in the last step
    seconds: float | None  # of `pipe.step`, the median of those after the first
    ways: Mapping[int, str]  # layer -> what it does about what it saves
    placed: tuple[int, ...]  # layers whose optimizer states are at the host

    def rows(self) -> tuple[Row, ...]:
        """The comparison, line by line."""
        said, seen = self.predicted, self.measured
        peaks = [(f"peak in {part}", said.get(part), seen.get(part)) for part in said]
        whole = (
            "peak",
            max(said.values(), default=None),
            max(seen.values(), default=None) if said.keys() == seen.keys() else None,
        )
        rows = [
            Row(label=label, show=format_bytes, predicted=one, measured=other, limit=self.budget)
            for label, one, other in (whole, *peaks)
        ]
        rows.append(Row(label="held by autograd", show=format_bytes, predicted=self.held[0], measured=self.held[1]))
        rows.append(Row(label="pipe.step", show=format_seconds, predicted=None, measured=self.seconds))
        return tuple(rows)

    @property
    def fits(self) -> bool | None:
        """Has the rank stayed within its budget? None: there is none, or nothing has been run."""
        return None if self.budget is None or not self.measured else max(self.measured.values()) <= self.budget

    def __str__(self) -> str:
        lines = [f"rank {self.rank}" + ("" if self.budget is None else f", budget {format_bytes(self.budget)}")]
        for row in self.rows():
            error = "" if row.error is None else f"  {row.error:+.1%}"
            lines.append(f"  {row.label:<22} predicted {row.said:>10}  measured {row.seen:>10}{error}")
        ways = Counter(self.ways.values())
        lines.append("  layers: " + ", ".join(f"{count} {way}" for way, count in sorted(ways.items())))
        if self.placed:
            lines.append(f"  optimizer states in host memory: layers {', '.join(map(str, self.placed))}")
        return "\n".join(lines)


def made_report(saving: StageSaving, meter: Meter | None, *, rank: int, budget: int | None) -> PipeReport:
    said = saving.whole
    parts = {"pipe.step": max(said["forward and backward"], said["adding up gradients"]), "optimizer.step": said["update"]}
    names = {STEP: "pipe.step", UPDATE: "optimizer.step"}
    seconds = meter.seconds[STEP] if meter is not None else []
    return PipeReport(
        rank=rank,
        budget=budget,
        predicted=parts,
        measured={names[part]: peak for part, peak in (meter.peaks if meter is not None else {}).items()},
        held=(saving.predicted, saving.held.most),
        seconds=statistics.median(seconds[1:] or seconds) if seconds else None,
        ways=saving.by_layer,
        placed=tuple(sorted(saving.place)),
    )
