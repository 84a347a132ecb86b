"""Who wins where: the fastest plan of each model and budget, and how far the others are behind it.

By predicted seconds, since every row has them. Two kinds of plans are shown, but neither win nor count as better than others:
those that change the numbers (`lossy`), and those that leave the device's allocator too little room (`cramped`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdall.units import format_bytes

NEAR = 1e-3  # a plan that is slower by less than this has won, too
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A planner in one cell."""

    planner: str
    seconds: float
    overhead: float  # seconds over those of plain training - 1
    peak: int
    numerics: str  # exact, close or lossy
    cramped: bool  # the allocator may run out of pages
    behind: float  # seconds over those of the cell's best - 1; negative: it does not count
    solved: float = 0.0  # seconds that planning took

    @property
    def counts(self) -> bool:
        return self.numerics != "lossy" and not self.cramped

    @property
    def wins(self) -> bool:
        return self.counts and self.behind <= NEAR


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One model at one budget."""

    model: str
    budget: str
    nbytes: int
    entries: Sequence[Standing]  # fastest first
    refused: Mapping[str, str]  # planner -> why it has no plan

    def of(self, planner: str) -> Standing | None:
        return next((e for e in self.entries if e.planner == planner), None)

    @property
    def winners(self) -> list[str]:
        return [e.planner for e in self.entries if e.wins]

    @property
    def best(self) -> Standing | None:
        return next((e for e in self.entries if e.counts), None)


@dataclass(frozen=True, kw_only=True)
class Standings:
    cells: Sequence[Contest]

    def wins(self) -> Counter[str]:
        return Counter(name for cell in self.cells for name in cell.winners)

    def worst(self, planner: str = AUTO) -> tuple[float, Contest] | None:
        """Where a planner is furthest behind; infinitely, where others have a plan and it has none."""
        there = [c for c in self.cells if c.best and (c.of(planner) or planner in c.refused)]
        found = [(entry.behind if (entry := c.of(planner)) else float("inf"), c) for c in there]
        return max(found, key=lambda f: f[0], default=None)

    def verdict(self) -> str:
        """One line about `auto`, or about the winners where it does not take part."""
        solved = [c for c in self.cells if c.best]
        if not solved:
            return "no plan fits any of the budgets"
        worst = self.worst()
        if worst is None:
            name, count = self.wins().most_common(1)[0]
            return f"{name} is the fastest, or within {NEAR:.1%} of it, in {count} of {len(solved)} cells"
        behind, cell = worst
        first = f"auto is the fastest, or within {NEAR:.1%} of it, in {self.wins()[AUTO]} of {len(solved)} cells"
        if behind <= NEAR:
            return first
        best, where = cell.best, f"{cell.model} at {cell.budget}"
        assert best is not None
        if behind == float("inf"):
            return f"{first}; {best.planner} has a plan and auto has none for {where}"
        return f"{first}; at most {behind:.1%} behind ({best.planner}, {where})"


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How often one planner is as fast as another or faster, over the cells in which both have a plan."""

    faster: str
    slower: str
    kept: int
    cells: int
    low: float  # seconds of the slower over those of the faster, in the cell where that is least
    high: float

    def __str__(self) -> str:
        times = f"{self.low:.2f}" if f"{self.low:.2f}" == f"{self.high:.2f}" else f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.faster} is as fast as {self.slower} or faster in {self.kept} of {self.cells} cells ({times} times)"


def tally(found: Standings, faster: str, slower: str) -> Tally | None:
    """Two planners, by name, compared over all cells; None: nowhere do both have a plan."""
    pairs = [(cell.of(faster), cell.of(slower)) for cell in found.cells]
    ratios = [slow.seconds / fast.seconds for fast, slow in pairs if fast is not None and slow is not None]
    if not ratios:
        return None
    kept = sum(ratio >= 1 - NEAR for ratio in ratios)
    return Tally(faster=faster, slower=slower, kept=kept, cells=len(ratios), low=min(ratios), high=max(ratios))


def standings(records: Sequence[Mapping[str, Any]]) -> Standings:
    """The standings of the planners in rows of `holdall compare`; peers are measured only and take no part."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        if record["kind"] == "planner":
            groups.setdefault((record["model"], record["budget"], record["budget_bytes"]), []).append(record)
    return Standings(cells=[_cell(*key, rows) for key, rows in groups.items()])


def _cell(model: str, budget: str, nbytes: int, rows: Sequence[Mapping[str, Any]]) -> Contest:
    planned = [r for r in rows if r["feasible"]]
    fair = [r["predicted_seconds"] for r in planned if r["numerics"] != "lossy" and not r["cramped"]]
    least = min(fair or [r["predicted_seconds"] for r in planned], default=0.0)
    entries = [
        Standing(
            planner=r["planner"],
            seconds=r["predicted_seconds"],
            overhead=r["predicted_overhead"],
            peak=r["predicted_peak_bytes"],
            numerics=r["numerics"],
            cramped=r["cramped"],
            behind=r["predicted_seconds"] / least - 1 if least else 0.0,
            solved=r["solve_seconds"] or 0.0,
        )
        for r in sorted(planned, key=lambda r: (r["predicted_seconds"], r["planner"]))
    ]
    refused = {r["planner"]: _why_not(r) for r in rows if not r["feasible"]}
    return Contest(model=model, budget=budget, nbytes=nbytes, entries=entries, refused=refused)


def _why_not(row: Mapping[str, Any]) -> str:
    needs = row["smallest_bytes"]
    return f"needs {format_bytes(needs)}" if needs else row["problem"]
