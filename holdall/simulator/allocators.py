"""Models of allocators: the bytes that a device's allocator reserves for a sequence of allocations and frees.

Live bytes are a lower bound; a real allocator also reserves rounding, slack and holes. `Ideal` counts live bytes. `Expandable`,
which the runtime switches on, has segments made of pages that are mapped and unmapped. `Caching` follows PyTorch's native CUDA
caching allocator rule by rule:

    request  -> rounded to 512 B -> small pool (<= 1 MiB) or large pool
    search   -> best fit among free blocks of the same stream; lowest address among equals
    miss     -> a new segment from the device: 2 MiB | 20 MiB (under 10 MiB) | rounded up to 2 MiB
    hit      -> the low part serves; the rest returns to the pool if it is worth keeping, otherwise it is slack
    free     -> merged with free neighbours of its segment; a segment is released only when the device runs out

Two things are left out: blocks held back by `record_stream` (holdall owns its buffers instead), and the addresses that the
driver picks. Here addresses only grow, so ties between equal blocks of different segments may be resolved differently.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Protocol

from holdall.errors import OverBudget, unknown_name
from holdall.types.layout import BLOCK, round_up
from holdall.types.trace import Bytes
from holdall.units import MiB, format_bytes

SMALL_REQUEST = MiB  # largest request served from the small pool
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB  # for requests of the large pool under MIN_OWN_SEGMENT
MIN_OWN_SEGMENT = 10 * MiB  # smallest request that gets a segment of its own size
ROUND_SEGMENT = 2 * MiB


class Allocator(Protocol):
    """Fed in program order. Keys are the caller's and can be reused after `free`."""

    def alloc(self, key: int, nbytes: Bytes, stream: int = 0) -> None: ...

    def free(self, key: int) -> None: ...

    @property
    def allocated(self) -> Bytes:
        """Bytes allocated, including rounding and slack."""

    @property
    def reserved(self) -> Bytes:
        """Bytes reserved from the device."""

    @property
    def peak_allocated(self) -> Bytes: ...

    @property
    def peak_reserved(self) -> Bytes: ...


class Ideal:
    """No holes: reserved bytes are the live bytes, each request rounded up to `align`."""

    def __init__(self, align: int = 1, *, limit: Bytes | None = None) -> None:
        self.align = align
        self.limit = limit
        self.allocated = 0
        self.peak_allocated = 0
        self._live: dict[int, Bytes] = {}

    def alloc(self, key: int, nbytes: Bytes, stream: int = 0) -> None:  # noqa: ARG002 - streams share everything here
        assert key not in self._live, f"{key} is already allocated"
        size = round_up(nbytes, self.align)
        if self.limit is not None and self.allocated + size > self.limit:
            raise _over(size, self.allocated, self.allocated, self.limit)
        self._live[key] = size
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        self.allocated -= self._live.pop(key)

    @property
    def reserved(self) -> Bytes:
        return self.allocated

    @property
    def peak_reserved(self) -> Bytes:
        return self.peak_allocated


class Recording(Ideal):
    """Also writes down what was asked of it."""

    def __init__(self, align: int = 1, *, limit: Bytes | None = None) -> None:
        super().__init__(align, limit=limit)
        self.order: list[tuple[int, Bytes]] = []  # (key, size) of each allocation, size -1 for a free

    def alloc(self, key: int, nbytes: Bytes, stream: int = 0) -> None:
        self.order.append((key, nbytes))
        super().alloc(key, nbytes, stream)

    def free(self, key: int) -> None:
        self.order.append((key, -1))
        super().free(key)


class Expandable(Recording):
    """Segments that grow and shrink by pages: holes are released, except for pages shared with live tensors."""

    SHARED = 0.03  # share of live bytes lost in partly used pages: 2 to 3 % at 8, 12 and 24 GiB on an H200
    PAGES = 128 * MiB  # plus six pages (64 MiB were 28 MiB too few at 6 GiB there); or, if little is live,
    SMALL = 1 / 6  # this share of it

    def __init__(self, *, limit: Bytes | None = None) -> None:
        super().__init__(BLOCK, limit=None if limit is None else self.usable(limit))

    @classmethod
    def usable(cls, limit: Bytes) -> Bytes:
        """The most bytes that can be live under a limit on reserved bytes."""
        little = int(limit / (1 + cls.SHARED + cls.SMALL))
        live = little if little * cls.SMALL <= cls.PAGES else int((limit - cls.PAGES) / (1 + cls.SHARED))
        return live + 1 if cls.taken(live + 1) <= limit else live  # `taken` rounds down too

    @classmethod
    def taken(cls, live: Bytes) -> Bytes:
        """Bytes reserved for this many live bytes."""
        return int(live * (1 + cls.SHARED) + min(cls.PAGES, live * cls.SMALL))

    @property
    def reserved(self) -> Bytes:
        return self.taken(self.allocated)

    @property
    def peak_reserved(self) -> Bytes:
        return self.taken(self.peak_allocated)


class ArenaModel(Expandable):
    """An arena with planned offsets for most of the step, and expandable segments for the rest: an estimate for searches.
    `arena_bytes` is what a layout that was found takes."""

    SHARED = 0.01  # share of live bytes for holes of the layout and small tensors outside: most layouts have none
    PAGES = 64 * MiB  # the last page, pages of small tensors and of other streams, and what the meter leaves to late kernels

    @classmethod
    def arena_bytes(cls, arena: Bytes, others: Bytes) -> Bytes:
        """Bytes reserved for an arena of this size and this many live bytes outside of it."""
        return int(arena + others + min(cls.PAGES, (arena + others) * cls.SMALL))


class HostArenaModel(ArenaModel):
    """The same on a host, which has no pages."""

    PAGES = 0


class PageBlock:
    """A range of bytes in one segment; its neighbours there are `before` and `after`."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(self, address: int, size: Bytes, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.is_free = True
        self.before: PageBlock | None = None
        self.after: PageBlock | None = None


class Pool:
    """The free blocks of one stream and one size class, ordered by (size, address) for best fit."""

    __slots__ = ("is_small", "listed")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.listed: list[tuple[Bytes, int, PageBlock]] = []  # addresses differ, so blocks are never compared

    def add(self, block: PageBlock) -> None:
        block.is_free = True
        insort(self.listed, (block.size, block.address, block))

    def remove(self, block: PageBlock) -> None:
        block.is_free = False
        del self.listed[bisect_left(self.listed, (block.size, block.address))]

    def take(self, size: Bytes) -> PageBlock | None:
        """The smallest free block of at least `size`; None: there is none."""
        at = bisect_left(self.listed, (size,))
        if at == len(self.listed):
            return None
        block = self.listed.pop(at)[2]
        block.is_free = False
        return block

    def keeps_rest(self, rest: Bytes) -> bool:
        """Does the rest of a block, after serving a request, become a block of its own?"""
        return rest >= BLOCK if self.is_small else rest > SMALL_REQUEST


class Caching:
    """PyTorch's CUDA caching allocator with default settings; `limit`: the most it may reserve."""

    def __init__(self, *, limit: Bytes | None = None) -> None:
        self.limit = limit
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0  # cache flushes to make room; each stalls a real device
        self._live: dict[int, PageBlock | None] = {}  # None: a request of zero bytes, which owns no block
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._segments: dict[
            int, PageBlock
        ] = {}  # address -> first block; merging keeps the lower block, so it stays the first
        self._next_address = 0

    def alloc(self, key: int, nbytes: Bytes, stream: int = 0) -> None:
        assert key not in self._live, f"{key} is already allocated"
        if nbytes == 0:
            self._live[key] = None
            return
        size = round_up(nbytes, BLOCK)
        pool = self._pool(size <= SMALL_REQUEST, stream)
        block = pool.take(size) or self._new_segment(size, pool)
        rest = block.size - size
        if pool.keeps_rest(rest):
            pool.add(cut(block, size))
        self._live[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        block = self._live.pop(key)
        if block is None:
            return
        self.allocated -= block.size
        pool = block.pool
        if block.before is not None and block.before.is_free:
            pool.remove(block.before)
            block = join(block.before, block)
        if block.after is not None and block.after.is_free:
            pool.remove(block.after)
            block = join(block, block.after)
        pool.add(block)

    def empty_cache(self) -> None:
        """Release every segment that is entirely free."""
        for pool in self._pools.values():
            kept = []
            for entry in pool.listed:
                size, address, block = entry
                if block.before is None and block.after is None:
                    del self._segments[address]
                    self.reserved -= size
                else:
                    kept.append(entry)
            pool.listed = kept

    def segments(self) -> Iterator[list[PageBlock]]:
        """The blocks of each segment in order of address."""
        for first in self._segments.values():
            blocks, block = [first], first
            while block.after is not None:
                block = block.after
                blocks.append(block)
            yield blocks

    def _pool(self, is_small: bool, stream: int) -> Pool:
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = Pool(is_small)
        return pool

    def _new_segment(self, size: Bytes, pool: Pool) -> PageBlock:
        taken = segment_size(size)
        if self.limit is not None and self.reserved + taken > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + taken > self.limit:
                raise _over(taken, self.allocated, self.reserved, self.limit)
        block = PageBlock(self._next_address, taken, pool)
        block.is_free = False
        self._segments[block.address] = block
        self._next_address += taken
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block


def cut(block: PageBlock, size: Bytes) -> PageBlock:
    """Shorten a block to `size` bytes; returns the rest."""
    rest = PageBlock(block.address + size, block.size - size, block.pool)
    rest.before, rest.after = block, block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.size = rest, size
    return rest


def join(low: PageBlock, high: PageBlock) -> PageBlock:
    """Merge two neighbours into the lower block."""
    low.size += high.size
    low.after = high.after
    if low.after is not None:
        low.after.before = low
    return low


def segment_size(size: Bytes) -> Bytes:
    """Bytes of the new segment for a rounded request that no cached block serves."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_OWN_SEGMENT:
        return LARGE_SEGMENT
    return round_up(size, ROUND_SEGMENT)


def _over(asked: Bytes, allocated: Bytes, reserved: Bytes, limit: Bytes) -> OverBudget:
    return OverBudget(
        f"{format_bytes(asked)} more cannot be allocated: {format_bytes(allocated)} are in use, "
        f"{format_bytes(reserved)} are reserved and the limit is {format_bytes(limit)}",
        hint="use a larger budget, or a smaller batch",
    )


_ALLOCATORS: dict[str, Callable[[Bytes | None], Allocator]] = {
    "ideal": lambda limit: Ideal(limit=limit),
    "caching": lambda limit: Caching(limit=limit),
    "expandable": lambda limit: Expandable(limit=limit),
    "arena": lambda limit: ArenaModel(limit=limit),
    "host_arena": lambda limit: HostArenaModel(limit=limit),
}


def usable_by(name: str | None, limit: Bytes) -> Bytes:
    """The most bytes that can be live under a limit on what the allocator of this name reserves."""
    kinds = {"expandable": Expandable, "arena": ArenaModel, "host_arena": HostArenaModel}
    return kinds[name].usable(limit) if name in kinds else limit


def make_allocator(name: str, *, limit: Bytes | None = None) -> Allocator:
    """A new allocator by name; `limit`: the most bytes it may reserve; None: unlimited."""
    if name not in _ALLOCATORS:
        raise unknown_name("allocator", name, _ALLOCATORS)
    return _ALLOCATORS[name](limit)
