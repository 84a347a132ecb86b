"""One range of memory in which planned tensors have their offsets, and the rest finds room beside them (STAlloc's allocator).

    planned   -> allocations are counted; the k-th of a step gets the k-th planned offset, if its size is the planned one
    dynamic   -> a request that is not in the plan, but is known to end by some moment, gets a range that the plan leaves idle
                 until then: the smallest that fits
    fallback  -> everything else goes to a caching allocator outside of the range
    next step -> the count begins anew, so a step that left the plan does not disturb the next

A planned offset is given out only if nothing lies there, so that a step that left the plan is still correct.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from holdall.packing import LaidOut
from holdall.simulator.allocators import Caching
from holdall.types.layout import round_up
from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes


class Range(NamedTuple):
    low: Bytes
    top: Bytes


class PlannedArena:
    """Keys are the caller's, and can be reused after `free`."""

    def __init__(self, lifetimes: StepLifetimes, layout: LaidOut, planned: Iterable[int]) -> None:
        assert layout.offsets is not None
        self._lifetimes, self._offsets = lifetimes, layout.offsets
        self._planned = sorted(planned, key=lambda n: (lifetimes.tensors[n].begin, n))
        self._next = 0
        self._live: dict[int, Range | None] = {}  # None: with the fallback
        self._taken: list[Range] = []  # by address
        self.size = layout.reserved
        self.fallback = Caching()
        self.planned = self.dynamic = self.fallen = 0  # requests served by each

    @property
    def reserved(self) -> Bytes:
        return self.size + self.fallback.peak_reserved

    def begin_step(self) -> None:
        """Count from the first allocation of a step again."""
        tensors = self._lifetimes.tensors
        self._next = 0
        while self._next < len(self._planned) and tensors[self._planned[self._next]].begin == 0:
            self._next += 1  # there from before

    def fill(self, numbers: Iterable[int]) -> None:
        """Put tensors that are there before the first step at their offsets; each has its number as key."""
        for number in numbers:
            self._take(number, Range(self._offsets[number], self._offsets[number] + self._lifetimes.tensors[number].size))

    def alloc(self, key: int, nbytes: Bytes, *, until: int | None = None) -> Bytes | None:
        """The offset of a request, None: outside of the range. `until`: a moment of the plan by which it will be freed."""
        size = round_up(nbytes, self._lifetimes.align)
        planned = self._as_planned(size) if until is None else None
        if planned is not None:
            self.planned += 1
            return self._take(key, planned)
        idle = self._idle(size, until) if until is not None else None
        if idle is not None:
            self.dynamic += 1
            return self._take(key, idle)
        self.fallen += 1
        self._live[key] = None
        self.fallback.alloc(key, nbytes)
        return None

    def free(self, key: int) -> None:
        taken = self._live.pop(key)
        if taken is None:
            self.fallback.free(key)
        else:
            del self._taken[bisect_left(self._taken, taken)]

    def _take(self, key: int, taken: Range) -> Bytes:
        assert key not in self._live, f"{key} is already allocated"
        self._live[key] = taken
        insort(self._taken, taken)
        return taken.low

    def _as_planned(self, size: Bytes) -> Range | None:
        """The range of the next planned request, if it has this size and nothing lies there."""
        if self._next >= len(self._planned):
            return None
        number = self._planned[self._next]
        if size != self._lifetimes.tensors[number].size:
            return None
        self._next += 1  # this is the one, also where something that lives longer than planned is in its place
        found = Range(self._offsets[number], self._offsets[number] + size)
        return found if self._is_free(found) else None

    def _is_free(self, asked: Range) -> bool:
        at = bisect_left(self._taken, asked)
        return all(r.top <= asked.low or r.low >= asked.top for r in self._taken[max(at - 1, 0) : at + 1])

    def _idle(self, size: Bytes, until: int) -> Range | None:
        """The smallest range that neither the plan needs until that moment nor anything occupies now."""
        tensors = self._lifetimes.tensors
        coming = self._planned[self._next :]
        used = [Range(self._offsets[n], self._offsets[n] + tensors[n].size) for n in coming if tensors[n].begin < until]
        best, top = None, 0
        for low, end in [*sorted([*used, *self._taken]), (self.size, self.size)]:
            if low - top >= size and (best is None or low - top < best.top - best.low):
                best = Range(top, low)
            top = max(top, end)
        return None if best is None else Range(best.low, best.low + size)
