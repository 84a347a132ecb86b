"""For every moment, the height up to which a strip is full: segments of equal height, the lowest one at hand."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from holdall.types.trace import Bytes


class Level(NamedTuple):
    """The strip is full up to `height` in [begin, end)."""

    height: Bytes
    begin: int
    end: int


class Skyline:
    def __init__(self, period: int, floor: Bytes) -> None:
        whole = Level(floor, 0, period)
        self._from, self._until = {0: whole}, {period: whole}
        self._heap = [whole]  # also segments that are no more

    def lowest(self) -> Level:
        """The lowest segment; the earliest among equals."""
        while self._from.get(self._heap[0].begin) != self._heap[0]:
            heappop(self._heap)
        return self._heap[0]

    def height(self, begin: int, end: int) -> Bytes:
        """The greatest height between two moments."""
        return max(s.height for s in self._from.values() if s.begin < end and s.end > begin)

    def fill(self, segment: Level, begin: int, end: int, height: Bytes) -> None:
        """Fill a part of a segment up to a greater height."""
        self._remove(segment)
        for part in ((segment.height, segment.begin, begin), (height, begin, end), (segment.height, end, segment.end)):
            if part[1] < part[2]:
                self._add(Level(*part))

    def fill_all(self, begin: int, end: int, height: Bytes) -> None:
        """Fill everything between two moments up to a height that is nowhere exceeded there."""
        for segment in [s for s in self._from.values() if s.begin < end and s.end > begin]:
            self.fill(segment, max(begin, segment.begin), min(end, segment.end), height)

    def raise_to_neighbour(self, segment: Level) -> None:
        """Give a segment that nothing fits into the height of the lower of its neighbours."""
        beside = [s.height for s in (self._until.get(segment.begin), self._from.get(segment.end)) if s is not None]
        self.fill(segment, segment.begin, segment.end, min(beside))

    def _remove(self, segment: Level) -> None:
        del self._from[segment.begin], self._until[segment.end]

    def _add(self, segment: Level) -> None:
        """Add a segment; neighbours of equal height become one."""
        before, after = self._until.get(segment.begin), self._from.get(segment.end)
        if before is not None and before.height == segment.height:
            self._remove(before)
            segment = segment._replace(begin=before.begin)
        if after is not None and after.height == segment.height:
            self._remove(after)
            segment = segment._replace(end=after.end)
        self._from[segment.begin] = self._until[segment.end] = segment
        heappush(self._heap, segment)
