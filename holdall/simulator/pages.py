"""A model of PyTorch's allocator with expandable segments: how a plan makes it move pages, step after step.

    request  -> rounded to 512 B -> small pool (<= 1 MiB) or large pool, each one address range that is mapped page by page
    search   -> best fit among free blocks; a block that can grow into unmapped addresses counts by its largest size
    miss     -> the lowest range that is long enough, free or unmapped; its missing pages are mapped
    limit    -> every entirely free page is unmapped, and the request is tried once more
    free     -> merged with free neighbours

Where free memory is in the wrong place, pages move: the device halts, unmaps pages and maps others, which the driver clears.
Live bytes do not show that, nor the bytes lost in pages that live tensors share with holes.

Left out: other streams, which have pools of their own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from holdall.simulator.allocators import (
    MIN_OWN_SEGMENT,
    ROUND_SEGMENT,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    PageBlock,
    Pool,
    cut,
    join,
)
from holdall.types.layout import BLOCK, round_up
from holdall.types.trace import Bytes, Seconds
from holdall.units import PAGE, GiB, TiB

_STEPS = 5  # the first differs from the others, and those among themselves
_SECONDS = 6.4e-3 / GiB  # seconds to unmap and map a byte: 3.2 and 3.1 ms per GiB on an H200 with CUDA 13
_HALT = 0.3e-3  # seconds until the device has work again: 26 halts and 14 GiB per step took less than 0.1 s there, in 6 GiB

Order = Sequence[tuple[int, Bytes]]  # (key, size) of each allocation; size -1: freed


class Churn(NamedTuple):
    """The allocator's work per step in the steady state."""

    halts: float = 0.0  # times that it ran out of pages and released free ones
    remapped: Bytes = 0
    missing: Bytes = 0  # bytes that it could not provide

    @property
    def seconds(self) -> Seconds:
        return self.halts * _HALT + self.remapped * _SECONDS


class Exhausted(Exception):
    """There are no pages for this many more bytes."""

    def __init__(self, missing: Bytes) -> None:
        super().__init__(missing)
        self.missing = missing


class Space(Pool):
    """The address range of one size class."""

    __slots__ = ("page", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        super().__init__(is_small)
        self.page = SMALL_SEGMENT if is_small else PAGE
        self.unmapped: list[tuple[int, PageBlock]] = [(0, PageBlock(0, TiB, self))]  # by address

    def keeps_rest(self, rest: Bytes) -> bool:
        return rest >= BLOCK

    def take(self, size: Bytes) -> PageBlock | None:
        at = bisect_left(self.listed, (size,))
        if at == len(self.listed):
            return None
        while at + 1 < len(self.listed) and self._grown(self.listed[at + 1][2]) < self._grown(self.listed[at][2]):
            at += 1
        block = self.listed.pop(at)[2]
        block.is_free = False
        return block

    def _grown(self, block: PageBlock) -> Bytes:
        after = block.after
        return block.size + (after.size if after is not None and self.is_unmapped(after) else 0)

    def is_unmapped(self, block: PageBlock) -> bool:
        at = bisect_left(self.unmapped, (block.address,))
        return at < len(self.unmapped) and self.unmapped[at][1] is block

    def is_mapped_and_free(self, block: PageBlock | None) -> bool:
        return block is not None and block.is_free and not self.is_unmapped(block)

    def lowest(self, size: Bytes) -> PageBlock:
        """The first range that is long enough, free or unmapped."""
        for _, block in self.unmapped:
            before = block.before
            begin = before if before is not None and before.is_free else block
            length, at = 0, begin
            while length < size and at is not None and at.is_free:
                length, at = length + at.size, at.after  # type: ignore[assignment]
            if length >= size:
                return begin
        raise Exhausted(size)  # of a TiB

    def map(self, block: PageBlock, size: Bytes) -> Bytes:
        """Map pages at the beginning of an unmapped block; returns their bytes. The rest stays unmapped."""
        taken = min(block.size, round_up(size, self.page))
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]
        if taken < block.size:
            rest = cut(block, taken)
            insort(self.unmapped, (rest.address, rest))
        return taken

    def unmap_free(self) -> Bytes:
        """Unmap all entirely free pages; returns their bytes."""
        given = 0
        for _, _, block in list(self.listed):
            first = round_up(block.address, self.page)
            end = (block.address + block.size) // self.page * self.page
            if end <= first:
                continue
            given += end - first
            self.remove(block)
            if end < block.address + block.size:
                self.add(cut(block, end - block.address))
            whole = block
            if first > block.address:
                whole = cut(block, first - block.address)
                self.add(block)
            whole.is_free = True
            insort(self.unmapped, (whole.address, whole))
            self._join(whole)
        return given

    def _join(self, block: PageBlock) -> None:
        """Merge unmapped neighbours."""
        before, after = block.before, block.after
        if after is not None and self.is_unmapped(after):
            del self.unmapped[bisect_left(self.unmapped, (after.address,))]
            join(block, after)
        if before is not None and self.is_unmapped(before):
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]
            join(before, block)


class Pages:
    """The allocator; `limit`: the most bytes it may map."""

    def __init__(self, limit: Bytes) -> None:
        self.limit = limit
        self.reserved = self.halts = self.mapped = 0
        self.live: dict[int, PageBlock | None] = {}  # None: a request of zero bytes, which owns no block
        self._small, self._large = Space(is_small=True), Space(is_small=False)

    def alloc(self, key: int, nbytes: Bytes) -> None:
        if nbytes == 0:
            self.live[key] = None
            return
        size = round_up(nbytes, BLOCK)
        space = self._small if size <= SMALL_REQUEST else self._large
        block = space.take(size) or self._more(size, space)
        if space.keeps_rest(block.size - size):
            rest = cut(block, size)
            if space.is_mapped_and_free(rest.after):
                assert rest.after is not None
                space.remove(rest.after)
                join(rest, rest.after)
            space.add(rest)
        self.live[key] = block

    def free(self, key: int) -> None:
        block = self.live.pop(key)
        if block is None:
            return
        space = block.pool
        assert isinstance(space, Space)
        before, after = block.before, block.after
        if space.is_mapped_and_free(before):
            assert before is not None
            space.remove(before)
            block = join(before, block)
        if space.is_mapped_and_free(after):
            assert after is not None
            space.remove(after)
            join(block, after)
        space.add(block)

    def _more(self, size: Bytes, space: Space) -> PageBlock:
        asked = round_up(size, ROUND_SEGMENT) if size >= MIN_OWN_SEGMENT else space.page
        if self.reserved + asked > self.limit:
            self.halts += 1
            self.reserved -= self._small.unmap_free() + self._large.unmap_free()
            if self.reserved + asked > self.limit:
                raise Exhausted(self.reserved + asked - self.limit)
        block = space.lowest(size)
        if space.is_unmapped(block):
            self._map(space, block, size)
        else:
            space.remove(block)
        block.is_free = False
        while block.size < size:
            after = block.after
            assert after is not None
            if space.is_unmapped(after):
                self._map(space, after, size - block.size)
            else:
                space.remove(after)
            join(block, after)
        return block

    def _map(self, space: Space, block: PageBlock, size: Bytes) -> None:
        taken = space.map(block, size)
        self.reserved += taken
        self.mapped += taken


def churn(order: Order, there: int, limit: Bytes) -> Churn:
    """The allocator's work when this order repeats every step. The first `there` entries are tensors present at the beginning
    and end of a step.
    """
    pages, before, body = Pages(limit), order[:there], order[there:]
    at_first = {key for key, _ in before}
    try:
        for key, size in before:
            pages.alloc(key, size)
        for n in range(_STEPS):
            if n == 1:
                pages.halts = pages.mapped = 0
            for key, size in body:
                if size < 0:
                    pages.free(key)
                else:
                    pages.alloc(key, size)
            for key in [k for k in pages.live if k not in at_first]:
                pages.free(key)
            for key, size in before:
                if key not in pages.live:
                    pages.alloc(key, size)
    except Exhausted as error:
        return Churn(missing=error.missing)
    return Churn(pages.halts / (_STEPS - 1), pages.mapped // (_STEPS - 1))
