"""Placed tensors in the order of their offsets, and the search for a gap that is free during a lifetime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from holdall.types.lifetimes import Lifetime, StepLifetimes
from holdall.types.trace import Bytes

_Numbers = NDArray[np.int64]


class Gaps:
    """Tensors at their offsets. A search is a few passes over arrays: thousands of tensors take a fraction of a second."""

    def __init__(self, lifetimes: StepLifetimes, *, floor: Bytes = 0) -> None:
        self._tensors, self._period, self._floor = lifetimes.tensors, lifetimes.period, floor
        self._rows = np.zeros((4, 2 * len(lifetimes.tensors)), np.int64)  # begin, end, offset, top; by offset
        self._count = 0
        self.offsets: dict[int, Bytes] = {}
        self.height = floor

    def place(self, number: int, *, tight: bool = False) -> Bytes:
        """Put a tensor at the lowest offset where it fits; `tight`: into the smallest gap that fits. Returns the offset."""
        tensor = self._tensors[number]
        offset = self._find(tensor, tight=tight)
        self.put(number, offset)
        return offset

    def put(self, number: int, offset: Bytes) -> None:
        """Put a tensor at this offset, whatever else is there."""
        tensor = self._tensors[number]
        for begin, end in tensor.spans(self._period):
            count = self._count
            rows = self._rows
            at = int(np.searchsorted(rows[2, :count], offset))
            rows[:, at + 1 : count + 1] = rows[:, at:count]
            rows[:, at] = begin, end, offset, offset + tensor.size
            self._count += 1
        self.offsets[number] = offset
        self.height = max(self.height, offset + tensor.size)

    def put_all(self, offsets: Mapping[int, Bytes]) -> None:
        """Put many tensors at once."""
        placed = [(self._tensors[n], offset) for n, offset in offsets.items()]
        rows = [(*span, offset, offset + t.size) for t, offset in placed for span in t.spans(self._period)]
        count = self._count + len(rows)
        if rows:
            self._rows[:, self._count : count] = np.array(rows, np.int64).T
            self._rows[:, :count] = self._rows[:, np.argsort(self._rows[2, :count], kind="stable")]
            self.height = max(self.height, *(row[3] for row in rows))
        self._count = count
        self.offsets.update(offsets)

    def _find(self, tensor: Lifetime, *, tight: bool) -> Bytes:
        begins, ends, lows, tops = self._rows[:, : self._count]
        spans = tensor.spans(self._period)
        mask = (begins < spans[0][1]) & (ends > spans[0][0])
        for begin, end in spans[1:]:
            mask |= (begins < end) & (ends > begin)
        lows, tops = lows[mask], tops[mask]
        if not len(lows):
            return self._floor
        below = np.empty(len(lows) + 1, np.int64)  # the end of everything in use below the k-th tensor
        below[0] = self._floor
        np.maximum.accumulate(tops, out=below[1:])
        np.maximum(below, self._floor, out=below)
        gaps = lows - below[:-1]
        fits = np.flatnonzero(gaps >= tensor.size)
        if not len(fits):
            return int(below[-1])
        chosen = fits[np.argmin(gaps[fits])] if tight else fits[0]
        return int(below[chosen])


def place_in_order(lifetimes: StepLifetimes, order: Iterable[int], *, floor: Bytes = 0, tight: bool = False) -> Gaps:
    """Place tensors one after the other, each at the lowest offset where it fits, or in the tightest gap."""
    gaps = Gaps(lifetimes, floor=floor)
    for number in order:
        gaps.place(number, tight=tight)
    return gaps
