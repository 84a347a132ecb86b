"""PyTorch's allocator with expandable segments, which the runtime switches on; `simulator/pages.py` has its rules.

Without a limit, so that no page moves: these are the pages that it maps where it may map all that it wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.packing import LaidOut
from holdall.packing.playing import play
from holdall.simulator.pages import Pages
from holdall.types.lifetimes import StepLifetimes
from holdall.units import TiB


@dataclass(frozen=True, kw_only=True)
class ExpandableLayout:
    """One range of addresses for each of two pools, mapped page by page."""

    steps: int = 3

    name: ClassVar[str] = "expandable"
    paper: ClassVar[str] = "PyTorch PR 96995, 2023"
    is_static: ClassVar[bool] = False

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        pages, before, after = Pages(TiB), 0, 0
        for _ in play(lifetimes, pages, self.steps):
            before, after = after, pages.mapped
        return LaidOut(reserved=pages.reserved, notes={"mapped in the last step": after - before})
