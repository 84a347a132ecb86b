"""An exact search for offsets within a capacity, in MiniMalloc's way (ASPLOS 2023).

canonical -> tensors are placed from below: by offset, then by a fixed order among equals; each rests on others or the floor
section   -> moments at which the same tensors are alive; what is left to place must fit above the current offset
dominated -> a tensor is not placed above a gap that another one still fits into
twins     -> of two equal tensors, the first goes below
free      -> a tensor that meets no other one left needs no alternatives
split     -> groups of tensors that never meet are searched one by one
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes

_Numbers = NDArray[np.int64]
_Mask = NDArray[np.bool_]


_SMALL = 20_000  # tensors times sections up to which a sharper bound is worth its time


class OutOfNodes(Exception):
    """The search was given up; there may be a solution."""


class _Node(NamedTuple):
    left: _Mask  # tensors that are not placed
    least: _Numbers  # the lowest offset of each: the top of all placed ones that it meets
    floors: _Numbers  # by section: the top of what is placed
    totals: _Numbers  # by section: bytes that are left to place
    crossing: _Numbers  # by boundary between sections: tensors left that are alive on both sides
    offset: Bytes  # of the last one placed, and its rank
    rank: int


class Exact:
    """The searches for one set of tensors; their numbers are positions in `numbers`."""

    def __init__(self, lifetimes: StepLifetimes, numbers: Sequence[int]) -> None:
        tensors = [lifetimes.tensors[n] for n in numbers]
        period = lifetimes.period
        spans = [t.spans(period) for t in tensors]
        moments = sorted({moment for each in spans for span in each for moment in span} | {0, period})
        section = {moment: k for k, moment in enumerate(moments)}
        self.sizes = np.array([t.size for t in tensors], np.int64)
        self.alive = np.zeros((len(tensors), len(moments) - 1), bool)
        for row, each in zip(self.alive, spans, strict=True):
            for begin, end in each:
                row[section[begin] : section[end]] = True
        wide = self.alive.astype(np.float32)
        self.meets = (wide @ wide.T) > 0
        np.fill_diagonal(self.meets, False)
        self.lengths = self.alive @ np.array([b - a for a, b in pairwise(moments)], np.int64)
        self.first = self.alive.argmax(1) if tensors else np.zeros(0, np.int64)
        self._crossed = np.zeros_like(self.alive)
        self._crossed[:, 1:] = self.alive[:, 1:] & self.alive[:, :-1]
        self._crossed[[t.wraps() for t in tensors]] = True  # it joins all that there is
        self._twin = self._find_twins()
        self._nodes = 0
        self._limit = 0
        self._capacity = 0
        self._ranks = np.arange(len(tensors))

    def _find_twins(self) -> _Numbers:
        """The tensor before each one with the same lifetime and size, which goes first; itself: there is none."""
        last: dict[tuple[int, bytes], int] = {}
        found = []
        for number, row in enumerate(self.alive):
            key = (int(self.sizes[number]), row.tobytes())
            found.append(last.get(key, number))
            last[key] = number
        return np.array(found, np.int64)

    def orders(self) -> list[_Numbers]:
        """Three ranks among equal offsets: by length, size in total, and area, in MiniMalloc's combinations."""
        totals = (self.alive * (self.sizes @ self.alive)).max(1, initial=0)
        area = self.sizes * self.lengths
        keys = [(self.lengths, area, totals), (totals, area, self.lengths), (totals, self.lengths, area)]
        return [np.argsort(np.lexsort([-k for k in reversed(each)])) for each in keys]

    def within(self, capacity: Bytes, ranks: _Numbers, nodes: int) -> _Numbers | None:
        """Offsets up to this capacity; None: there are none. `OutOfNodes` if that many nodes do not decide it."""
        self._nodes, self._limit, self._capacity, self._ranks = 0, nodes, capacity, ranks
        count, sections = self.alive.shape
        left = np.ones(count, bool)
        zeros = np.zeros(sections, np.int64)
        root = _Node(left, np.zeros(count, np.int64), zeros, self.sizes @ self.alive, self._crossed.sum(0), 0, -1)
        offsets = np.zeros(count, np.int64)
        return offsets if self._solve(root, offsets) else None

    def _solve(self, node: _Node, offsets: _Numbers) -> bool:
        """Place all that is left, writing into `offsets`."""
        if not node.left.any():
            return True
        if (self._lowest(node) + node.totals > self._capacity)[node.totals > 0].any():
            return False
        parts = self._parts(node)
        if len(parts) > 1:
            return all(self._search(self._only(node, part), offsets) for part in parts)
        return self._search(node, offsets)

    def _lowest(self, node: _Node) -> _Numbers:
        """By section: no offset of what is left there can be lower."""
        floors: _Numbers = np.maximum(node.floors, node.offset)
        if self.alive.size > _SMALL:
            return floors
        rows = self.alive[node.left]
        least: _Numbers = np.where(rows, node.least[node.left][:, None], self._capacity).min(0, initial=self._capacity)
        sharper: _Numbers = np.maximum(floors, least)
        return sharper

    def _search(self, node: _Node, offsets: _Numbers) -> bool:
        left = np.flatnonzero(node.left)
        least, ranks = node.least[left], self._ranks[left]
        allowed = (least > node.offset) | ((least == node.offset) & (ranks > node.rank))
        allowed &= least < (least + self.sizes[left]).min()
        allowed &= ~node.left[self._twin[left]] | (self._twin[left] == left)
        chosen = left[allowed]
        for number in chosen[np.lexsort((self._ranks[chosen], node.least[chosen]))]:
            self._nodes += 1
            if self._nodes > self._limit:
                raise OutOfNodes
            offset = int(node.least[number])
            if offset + self.sizes[number] > self._capacity:
                continue
            offsets[number] = offset
            if self._solve(self._place(node, number, offset), offsets):
                return True
            if not (self.meets[number] & node.left).any():
                return False
        return False

    def _place(self, node: _Node, number: int, offset: Bytes) -> _Node:
        top, alive = offset + int(self.sizes[number]), self.alive[number]
        left = node.left.copy()
        left[number] = False
        return _Node(
            left,
            np.where(self.meets[number], np.maximum(node.least, top), node.least),
            np.where(alive, top, node.floors),
            node.totals - alive * self.sizes[number],
            node.crossing - self._crossed[number],
            offset,
            int(self._ranks[number]),
        )

    def _parts(self, node: _Node) -> list[_Mask]:
        """What is left in groups that never meet."""
        cuts = np.flatnonzero(node.crossing == 0)
        group = np.searchsorted(cuts, self.first, side="right")
        return [node.left & (group == g) for g in np.unique(group[node.left])]

    def _only(self, node: _Node, part: _Mask) -> _Node:
        """The same node with a part of what is left."""
        return node._replace(
            left=part, totals=(self.sizes * part) @ self.alive, crossing=(self._crossed & part[:, None]).sum(0)
        )


def least_height(exact: Exact, low: Bytes, high: Bytes, unit: Bytes, nodes: int) -> tuple[_Numbers | None, bool]:
    """(offsets of the least height from `low` on, below `high`; whether it is proved that there is nothing lower).

    No offsets: none were found below `high`.
    """
    best, is_proved, capacity = None, True, low
    while low < high:
        try:
            found = _in_turns(exact, capacity, nodes)
        except OutOfNodes:
            is_proved = False
            break
        if found is None:
            low = capacity + unit
        else:
            best, high = found, int((found + exact.sizes).max())
        capacity = low + (high - low) // unit // 2 * unit
    return best, is_proved


def _in_turns(exact: Exact, capacity: Bytes, nodes: int) -> _Numbers | None:
    """Search by each order in turn, with twice the nodes in each round."""
    limit = 200
    while True:
        for ranks in exact.orders():
            try:
                return exact.within(capacity, ranks, limit)
            except OutOfNodes:
                nodes -= limit
                if nodes <= 0:
                    raise
        limit *= 2
