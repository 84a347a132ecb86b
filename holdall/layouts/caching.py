"""PyTorch's CUDA caching allocator with its default settings; `simulator/allocators.py` has its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.packing import LaidOut
from holdall.packing.playing import play
from holdall.simulator.allocators import Caching
from holdall.types.lifetimes import StepLifetimes


@dataclass(frozen=True, kw_only=True)
class CachingLayout:
    """Best fit with splitting, in segments that are never moved."""

    steps: int = 3  # what the first one leaves cached serves the next

    name: ClassVar[str] = "caching"
    paper: ClassVar[str] = "PyTorch, CUDACachingAllocator"
    is_static: ClassVar[bool] = False

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        allocator = Caching()
        for _ in play(lifetimes, allocator, self.steps):
            pass
        return LaidOut(reserved=allocator.peak_reserved, notes={"segments": sum(1 for _ in allocator.segments())})
