"""Layouts of a planned step, side by side: what each reserves for what is live, and how long it takes to find."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdall.packing import LayoutMember, Reorders
from holdall.packing.check import check_layout
from holdall.planning.finish import with_traced
from holdall.simulator.lifetimes import PlannedStep
from holdall.types import Action, Problem


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One layout of a step."""

    name: str
    is_static: bool
    tensors: int
    live: int  # bytes at the peak, in the order of ops that this layout chose
    bound: int  # the largest load with aligned sizes: no layout can reserve less
    reserved: int
    seconds: float  # to find it
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Reserved bytes for each that is live at the peak."""
        return self.reserved / self.live if self.live else 1.0


def compare_layouts(problem: Problem, actions: Sequence[Action], members: Sequence[LayoutMember]) -> list[LayoutRow]:
    """Every layout of the step under these actions. Static ones pass the naive checker, or an error is raised."""
    planned = PlannedStep.of(problem, with_traced(problem, actions))
    known = planned.run()
    rows = []
    for number, member in enumerate(members):
        problem.progress(f"laying out by {member.name}", number, len(members), "")
        began = time.perf_counter()
        lifetimes, outcome = member.reorder(planned).run() if isinstance(member, Reorders) else known
        found = member(lifetimes)
        seconds = time.perf_counter() - began
        if found.offsets is not None:
            check_layout(lifetimes, found)
        rows.append(
            LayoutRow(
                name=member.name,
                is_static=member.is_static,
                tensors=len(lifetimes.tensors),
                live=outcome.peak[problem.home],
                bound=lifetimes.load,
                reserved=found.reserved,
                seconds=seconds,
                notes=dict(found.notes),
            )
        )
    return rows
