"""A model of addresses: one range of memory cut into pieces, each free or owned by one storage.

It says where storages would be if the whole budget were one reserved range; MegTaiChi and Coop decide by that. Coop ("Memory is
not a Commodity", NeurIPS 2023) evicts a run of adjacent storages at once, found by a two-pointer sweep, and places cheap
storages at one end and expensive ones at the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdall.types.layout import round_up
from holdall.types.trace import Bytes

Cost = Callable[["Piece"], "float | None"]  # None: cannot be evicted


class Piece:
    """A range of bytes; `owner` None: free."""

    __slots__ = ("after", "before", "owner", "size", "start")

    def __init__(self, start: Bytes, size: Bytes, owner: Any = None) -> None:
        self.start = start
        self.size = size
        self.owner = owner
        self.before: Piece | None = None
        self.after: Piece | None = None

    def __repr__(self) -> str:
        return f"Piece({self.start}+{self.size}, {'free' if self.owner is None else self.owner})"


class Arena:
    def __init__(self, size: Bytes, *, align: int = 1) -> None:
        self.size = size
        self.align = align
        self.free_bytes = size
        self.first: Piece | None = Piece(0, size) if size > 0 else None
        self.fragmentation: list[float] = []  # free share of the arena at each request that found no hole

    def __iter__(self) -> Iterator[Piece]:
        at = self.first
        while at is not None:
            yield at
            at = at.after

    def rounded(self, size: Bytes) -> Bytes:
        return max(self.align, round_up(size, self.align))

    # holes

    def holes(self, size: Bytes) -> list[Piece]:
        return [p for p in self if p.owner is None and p.size >= size]

    def largest(self) -> Bytes:
        return max((p.size for p in self if p.owner is None), default=0)

    def free_beside(self, piece: Piece) -> Bytes:
        """Free bytes adjacent to the piece."""
        beside = (piece.before, piece.after)
        return sum(p.size for p in beside if p is not None and p.owner is None)

    def take(self, owner: Any, size: Bytes, *, where: str = "best") -> Piece | None:
        """Allocate a piece for `owner`: in the tightest hole, or at the `left` or `right` end; None: no hole is
        large enough."""
        size = self.rounded(size)
        holes = self.holes(size)
        if not holes:
            return None
        hole = {"best": min(holes, key=lambda p: p.size), "left": holes[0], "right": holes[-1]}[where]
        self.free_bytes -= size
        rest = hole.size - size
        if rest == 0:
            hole.owner = owner
            return hole
        if where == "right":
            taken = Piece(hole.start + rest, size, owner)
            hole.size = rest
            self._link(hole, taken, hole.after)
            return taken
        left = Piece(hole.start + size, rest)
        hole.size, hole.owner = size, owner
        self._link(hole, left, hole.after)
        return hole

    def give(self, piece: Piece) -> None:
        """Free a piece and merge it with free neighbours."""
        self.free_bytes += piece.size
        piece.owner = None
        if piece.after is not None and piece.after.owner is None:
            self._merge(piece, piece.after)
        if piece.before is not None and piece.before.owner is None:
            self._merge(piece.before, piece)

    def note_miss(self) -> None:
        """Record the free share of the arena at a request that found no hole."""
        self.fragmentation.append(self.free_bytes / self.size)

    def _merge(self, left: Piece, right: Piece) -> None:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left

    def _link(self, left: Piece, new: Piece, right: Piece | None) -> None:
        left.after, new.before, new.after = new, left, right
        if right is not None:
            right.before = new


@dataclass(frozen=True, kw_only=True)
class Window:
    pieces: tuple[Piece, ...]
    cost: float


def cheapest_window(pieces: Sequence[Piece], size: Bytes, cost: Cost) -> Window | None:
    """The run of adjacent pieces of at least `size` bytes that is cheapest to evict; None: there is none. One sweep.

    A piece that cannot be evicted ends a run. Free pieces cost nothing. The first of equal runs wins.
    """
    costs = [cost(p) for p in pieces]
    best: tuple[float, int, int] | None = None
    start, held, total = 0, 0, 0.0
    for end, piece in enumerate(pieces):
        this = costs[end]
        if this is None:
            start, held, total = end + 1, 0, 0.0
            continue
        held += piece.size
        total += this
        while held - pieces[start].size >= size:
            held -= pieces[start].size
            total -= costs[start] or 0.0
            start += 1
        if held >= size and (best is None or total < best[0]):
            best = (total, start, end + 1)
    if best is None:
        return None
    chosen = pieces[best[1] : best[2]]
    return Window(pieces=tuple(chosen), cost=sum(cost(p) or 0.0 for p in chosen))
