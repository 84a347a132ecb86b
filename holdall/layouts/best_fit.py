"""Profile-guided best fit (Sekiyama et al., 2018): a strip is filled from below, always at its lowest place.

    lowest   -> the lowest segment of the skyline takes the longest-lived tensor that is alive only inside of it
    none     -> the segment is raised to its lower neighbour, and that area stays empty

Tensors that are alive from one step to the next are placed first, one above the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from holdall.packing import LaidOut
from holdall.packing.orders import by_size, laid_out, lay_ground
from holdall.packing.skyline import Level, Skyline
from holdall.types.lifetimes import StepLifetimes


@dataclass(frozen=True, kw_only=True)
class BestFit:
    """Best fit over the skyline of the whole step."""

    name: ClassVar[str] = "best_fit"
    paper: ClassVar[str] = "Sekiyama et al., 2018"
    is_static: ClassVar[bool] = True

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        offsets, others, floor = lay_ground(lifetimes)
        skyline = Skyline(lifetimes.period, floor)
        for number in by_size(lifetimes, [n for n in others if lifetimes.tensors[n].wraps()]):
            spans, size = lifetimes.tensors[number].spans(lifetimes.period), lifetimes.tensors[number].size
            offsets[number] = max(skyline.height(*span) for span in spans)
            for span in spans:
                skyline.fill_all(*span, offsets[number] + size)
        waiting = _Waiting(lifetimes, [n for n in others if not lifetimes.tensors[n].wraps()])
        while waiting.count:
            lowest = skyline.lowest()
            chosen = waiting.take(lowest)
            if chosen is None:
                skyline.raise_to_neighbour(lowest)
                continue
            tensor = lifetimes.tensors[chosen]
            offsets[chosen] = lowest.height
            skyline.fill(lowest, tensor.begin, tensor.end, lowest.height + tensor.size)
        return laid_out(lifetimes, offsets)


class _Waiting:
    """Tensors that are not placed yet, by their beginning."""

    def __init__(self, lifetimes: StepLifetimes, numbers: list[int]) -> None:
        self._numbers = numbers
        chosen = [lifetimes.tensors[n] for n in numbers]
        self._begins = np.array([t.begin for t in chosen], np.int64)
        self._ends = np.array([t.end for t in chosen], np.int64)
        self._lengths = self._ends - self._begins
        self._is_placed = np.zeros(len(chosen), bool)
        self.count = len(chosen)

    def take(self, segment: Level) -> int | None:
        """The longest-lived tensor that is alive only inside of the segment; None: there is none."""
        low, high = np.searchsorted(self._begins, [segment.begin, segment.end])
        inside = (self._ends[low:high] <= segment.end) & ~self._is_placed[low:high]
        if not inside.any():
            return None
        at = int(low + np.argmax(np.where(inside, self._lengths[low:high], 0)))
        self._is_placed[at] = True
        self.count -= 1
        return self._numbers[at]
