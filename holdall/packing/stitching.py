"""A model of GMLake's allocator (ASPLOS 2024): virtual blocks are stitched together from physical ones.

    chunk    -> 2 MiB of physical memory, mapped at any number of virtual addresses
    primitive-> a block with chunks of its own; it may be split between two chunks
    stitched -> a block of virtual addresses over the chunks of several primitive ones; free if all of these are
    request  -> below `smallest`: the caching allocator. Else
                1. a free block of exactly this size, stitched or primitive
                2. the smallest larger primitive one, split; the whole stays as a stitched block
                3. the largest free primitive ones, the last of them split, stitched together
                4. all free ones, stitched together with a new one for the rest

Left out: streams, limits of the driver, and the garbage collection of stitched blocks, which frees addresses only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from holdall.simulator.allocators import Caching
from holdall.types.layout import round_up
from holdall.types.trace import Bytes
from holdall.units import MiB

CHUNK = 2 * MiB


class Primitive:
    """A block with chunks of its own: the numbers from `first` on."""

    __slots__ = ("chunks", "first", "is_free", "stitched")

    def __init__(self, first: int, chunks: int) -> None:
        self.first, self.chunks, self.is_free = first, chunks, False
        self.stitched: list[Stitched] = []  # blocks that map its chunks too

    def __lt__(self, other: Primitive) -> bool:
        return (self.chunks, self.first) < (other.chunks, other.first)


class Stitched:
    """A range of virtual addresses over primitive blocks."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Primitive]) -> None:
        self.parts = parts
        for part in parts:
            part.stitched.append(self)

    @property
    def is_free(self) -> bool:
        return all(part.is_free for part in self.parts)


class Stitching:
    """`smallest`: the least request that is served in chunks."""

    def __init__(self, smallest: Bytes = CHUNK) -> None:
        self._smallest = smallest
        self.small = Caching()
        self.chunks = self.stitches = self.splits = 0  # made so far
        self._free: list[Primitive] = []  # by size
        self._stitched: dict[int, list[Stitched]] = defaultdict(list)  # by size
        self._live: dict[int, list[Primitive] | None] = {}  # None: with the caching allocator

    @property
    def reserved(self) -> Bytes:
        return self.chunks * CHUNK + self.small.reserved

    def alloc(self, key: int, nbytes: Bytes) -> None:
        if nbytes < self._smallest:
            self._live[key] = None
            self.small.alloc(key, nbytes)
            return
        parts = self._find(round_up(nbytes, CHUNK) // CHUNK)
        for part in parts:
            part.is_free = False
        self._live[key] = parts

    def free(self, key: int) -> None:
        parts = self._live.pop(key)
        if parts is None:
            self.small.free(key)
            return
        for part in parts:
            part.is_free = True
            insort(self._free, part)

    def allocated(self) -> list[int]:
        """The numbers of all chunks in use, as often as they are."""
        owned = [part for parts in self._live.values() if parts for part in parts]
        return [chunk for part in owned for chunk in range(part.first, part.first + part.chunks)]

    def _find(self, chunks: int) -> list[Primitive]:
        for stitched in self._stitched[chunks]:
            if stitched.is_free:
                return self._take(stitched.parts)
        at = bisect_left(self._free, chunks, key=lambda part: part.chunks)
        if at == len(self._free):
            return self._stitch(chunks)
        block = self._free.pop(at)
        return [block if block.chunks == chunks else self._split(block, chunks)]

    def _take(self, parts: list[Primitive]) -> list[Primitive]:
        for part in parts:
            del self._free[bisect_left(self._free, part)]
        return list(parts)

    def _split(self, block: Primitive, chunks: int) -> Primitive:
        """Cut a primitive block that is not in the list of free ones; the first part is returned, the rest becomes free."""
        rest = Primitive(block.first + chunks, block.chunks - chunks)
        rest.is_free = True
        insort(self._free, rest)
        whole, block.chunks = block.chunks, chunks
        for stitched in block.stitched:
            at = stitched.parts.index(block)
            stitched.parts.insert(at + 1, rest)
            rest.stitched.append(stitched)
        self._stitched[whole].append(Stitched([block, rest]))
        self.splits += 1
        return block

    def _stitch(self, chunks: int) -> list[Primitive]:
        parts, left = [], chunks
        while left and self._free:
            part = self._free.pop()
            if part.chunks > left:
                part = self._split(part, left)
            parts.append(part)
            left -= part.chunks
        if left:
            parts.append(Primitive(self.chunks, left))
            self.chunks += left
        if len(parts) > 1:
            self._stitched[chunks].append(Stitched(list(parts)))
            self.stitches += 1
        return parts
