"""GMLake (ASPLOS 2024): scattered physical chunks become one block of virtual addresses; the rules: `packing/stitching.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.packing import LaidOut
from holdall.packing.playing import play
from holdall.packing.stitching import CHUNK, Stitching
from holdall.types.lifetimes import StepLifetimes


@dataclass(frozen=True, kw_only=True)
class GMLake:
    """Stitching over virtual memory; in steps that repeat, it soon finds all blocks that it needs."""

    smallest: int = CHUNK  # bytes; smaller requests go to the caching allocator
    steps: int = 4

    name: ClassVar[str] = "gmlake"
    paper: ClassVar[str] = "GMLake, ASPLOS 2024"
    is_static: ClassVar[bool] = False

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        allocator, made = Stitching(self.smallest), [0]
        for _ in play(lifetimes, allocator, self.steps):
            made.append(allocator.stitches)
        return LaidOut(
            reserved=allocator.reserved,
            notes={"stitches": made[-1], "in the last step": made[-1] - made[-2] if made[1:] else 0},
        )
