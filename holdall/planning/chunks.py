"""Parameters in chunks of one size: how they are packed, and which chunks a memory that is too small holds when.

The rule of all chunk systems is Belady's: the chunk whose next use is farthest makes way. For chunks of equal size no rule
moves less. `misses` counts what a cache of some blocks loads; `ChunkStore` carries the rule out moment by moment, with room
that changes and a state for every tensor, as PatrickStar and Gemini do while a step runs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

# packing


def pack(sizes: Sequence[int], chunk: int) -> list[list[int]]:
    """Parameters of every chunk, in order: one that does not fit any more begins the next chunk. A larger one has its own."""
    chunks: list[list[int]] = []
    room = 0
    for n, size in enumerate(sizes):
        if size > room or not chunks:
            chunks.append([])
            room = max(chunk, size)
        chunks[-1].append(n)
        room -= size
    return chunks


def waste(sizes: Sequence[int], chunk: int) -> int:
    """Elements of the chunks that hold no parameter."""
    unused = room = 0
    for size in sizes:
        if size > room:
            unused += room
            room = max(chunk, size)
        room -= size
    return unused + room


# caches


def next_use(uses: Sequence[int], now: int, period: int, *, wraps: bool = True) -> int:
    """The next moment after `now`. If there is none in this step: the first of the next step (`wraps`), or its end."""
    at = bisect_right(uses, now)
    if at < len(uses):
        return uses[at]
    if not wraps:
        return period
    return period + uses[0] if uses else 2 * period


def misses(accesses: Sequence[int], blocks: int) -> list[bool]:
    """For every access to a chunk: must it be loaded into one of `blocks` blocks? The chunk used again last makes way."""
    uses: dict[int, list[int]] = {}
    for at, chunk in enumerate(accesses):
        uses.setdefault(chunk, []).append(at)
    here: set[int] = set()
    found = []
    for at, chunk in enumerate(accesses):
        found.append(chunk not in here)
        if chunk in here:
            continue
        if here and len(here) >= blocks:
            here.remove(max(here, key=lambda c: (_again(uses[c], at), -c)))
        here.add(chunk)
    return found


def _again(uses: Sequence[int], now: int) -> float:
    at = bisect_right(uses, now)
    return uses[at] if at < len(uses) else math.inf


class IllegalMove(Exception):
    """A tensor would go from one state to another that does not follow it."""


class ChunkStore:
    """Chunks on the device or not, and the state of every tensor, in a step whose moments are known.

    `edges`: the states that may follow each state; tensors begin in `HOLD`. `wraps`: next uses count on into the next step.
    Chunks in `pinned` are always on the device.
    """

    HOLD = "HOLD"
    COMPUTE = "COMPUTE"

    def __init__(
        self,
        nbytes: Sequence[int],
        chunk_of: Sequence[int],
        uses: Sequence[Sequence[int]],
        period: int,
        edges: Mapping[str, Iterable[str]],
        *,
        wraps: bool = True,
        pinned: Collection[int] = (),
    ) -> None:
        self.nbytes = nbytes
        self.pinned = frozenset(pinned)
        self.here: set[int] = set(pinned)
        self.used = sum(nbytes[c] for c in pinned)  # bytes
        self.states = [self.HOLD] * len(chunk_of)
        self.evicted: list[tuple[int, int]] = []  # (moment, chunk)
        self._chunk_of = chunk_of
        self._computing = [0] * len(nbytes)  # tensors of each chunk that are computed with
        self._uses = uses
        self._period = period
        self._wraps = wraps
        self._edges = {state: frozenset(to) for state, to in edges.items()}

    def move(self, tensor: int, to: str) -> None:
        """Change a tensor's state; to `COMPUTE` only while its chunk is on the device."""
        state, chunk = self.states[tensor], self._chunk_of[tensor]
        if to not in self._edges.get(state, ()):
            raise IllegalMove(f"tensor {tensor} cannot go from {state} to {to}")
        if to == self.COMPUTE and chunk not in self.here:
            raise IllegalMove(f"tensor {tensor} is not on the device")
        self._computing[chunk] += (to == self.COMPUTE) - (state == self.COMPUTE)
        self.states[tensor] = to

    def bring(self, chunk: int, now: int, room: int) -> bool:
        """Load a chunk, after others have left until all fit into `room` bytes; False: it was here."""
        if chunk in self.here:
            return False
        self.shrink(now, room - self.nbytes[chunk])
        self.here.add(chunk)
        self.used += self.nbytes[chunk]
        return True

    def shrink(self, now: int, room: int) -> None:
        """Evict the chunks that are used last until the others fit, or only chunks in use are left."""
        if self.used <= room:
            return
        for chunk in sorted(self.evictable(), key=lambda c: (-self.next_use(c, now), c)):
            if self.used <= room:
                return
            self.here.remove(chunk)
            self.used -= self.nbytes[chunk]
            self.evicted.append((now, chunk))

    def evictable(self) -> set[int]:
        return {c for c in self.here if not self._computing[c] and c not in self.pinned}

    def next_use(self, chunk: int, now: int) -> int:
        return next_use(self._uses[chunk], now, self._period, wraps=self._wraps)
