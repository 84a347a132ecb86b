"""Room in files, given out by the page and counted by the byte.

An extent's bytes lie in all files by turns, a stripe in each, so that one copy keeps every disk busy. What is given back is a
hole that later extents fill. A training step takes the same sizes every time, so files grow in the first one alone.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from holdall.errors import DiskError, OverBudget
from holdall.tiers._disk_files import DiskFile
from holdall.types.layout import PAGE, round_up
from holdall.units import format_bytes

_mapped: dict[int, Extent] = {}  # by address


class FilePart(NamedTuple):
    """Bytes of a file that is open."""

    descriptor: int
    offset: int
    nbytes: int


def in_files(address: int, nbytes: int) -> list[FilePart]:
    """The parts of files that this memory is a mapping of, in order; empty: it is not."""
    for begin, extent in list(_mapped.items()):
        if begin <= address and address + nbytes <= begin + extent.nbytes:
            return list(extent.parts_of(address - begin, nbytes))
    return []


class FileRoom:
    """One file: the holes between what is taken of it."""

    def __init__(self, file: DiskFile) -> None:
        self.file = file
        self._holes = [(0, file.length)]  # (begin, end), in order, none next to another

    def prepare(self, nbytes: int) -> None:
        """Reserve so much in all."""
        before = self.file.length
        self.file.grow(round_up(nbytes, PAGE))
        if self.file.length > before:
            self.give(before, self.file.length - before)

    def take(self, nbytes: int) -> int:
        """The offset of so many bytes, in whole pages: in the first hole that is large enough, else at the end."""
        size = round_up(nbytes, PAGE)
        for n, (begin, end) in enumerate(self._holes):
            if end - begin >= size:
                self._holes[n : n + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin = end = self.file.length
        if self._holes and self._holes[-1][1] == end:
            begin = self._holes[-1][0]
        self.file.grow(begin + size)
        if begin < end:
            self._holes.pop()
        return begin

    def give(self, begin: int, nbytes: int) -> None:
        end = begin + round_up(nbytes, PAGE)
        touching = [hole for hole in self._holes if begin <= hole[1] and hole[0] <= end]
        apart = [hole for hole in self._holes if hole not in touching]
        begin, end = min([begin, *(hole[0] for hole in touching)]), max([end, *(hole[1] for hole in touching)])
        self._holes = sorted([*apart, (begin, end)])


@dataclass(slots=True, eq=False)
class Extent:
    """Bytes in files. `sums`: checksums of pieces by where they begin."""

    nbytes: int
    stripe: int
    parts: tuple[tuple[FileRoom, int, int], ...]  # offset and size in each file, where its stripes lie next to each other
    sums: dict[int, tuple[int, int]] = field(default_factory=dict)
    mapped: torch.Tensor | None = None
    place: mmap.mmap | None = None  # what `mapped` is a view of
    is_written: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether any of its files is read and written past the page cache; what is mapped, only where a mapping sees that."""
        files = [space.file for space, _, _ in self.parts]
        return any(file.is_direct for file in files) and (self.mapped is None or all(file.is_coherent for file in files))

    def at(self, begin: int) -> tuple[DiskFile, int]:
        """The file and the offset of a byte."""
        stripe, inside = divmod(begin, self.stripe)
        space, offset, _ = self.parts[stripe % len(self.parts)]
        return space.file, offset + stripe // len(self.parts) * self.stripe + inside

    def parts_of(self, begin: int, nbytes: int) -> Iterator[FilePart]:
        """What lies together in a file, of these bytes."""
        end = begin + nbytes
        while begin < end:
            stop = end if len(self.parts) == 1 else min(end, begin - begin % self.stripe + self.stripe)
            file, offset = self.at(begin)
            yield FilePart(file.descriptor, offset, stop - begin)
            begin = stop

    def memory(self) -> torch.Tensor:
        """The bytes as memory: the system reads pages when they are touched, and writes them back when it sees fit."""
        if self.mapped is None:
            self.place = mmap.mmap(-1, round_up(self.nbytes, PAGE))  # which the files take the place of
            self.mapped = torch.frombuffer(self.place, dtype=torch.uint8, count=self.nbytes)
            for begin, size in self._stretches():
                file, offset = self.at(begin)
                file.map(self.mapped.data_ptr() + begin, round_up(size, PAGE), offset)
            _mapped[self.mapped.data_ptr()] = self
        return self.mapped

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """(begin, size) of what lies together in a file."""
        size = self.nbytes if len(self.parts) == 1 else self.stripe
        for begin in range(0, self.nbytes, size):
            yield begin, min(size, self.nbytes - begin)


class Extents:
    """Gives extents and takes them back; never has more than `capacity` bytes out (None: no end)."""

    def __init__(self, tier: str, capacity: int | None, files: Sequence[DiskFile], stripe: int) -> None:
        self.tier = tier
        self.capacity = capacity
        self.used = self.peak = 0
        self.sent = self.fetched = 0  # bytes copied into files, and out of them
        self.saved = self.loaded = 0  # the same, from and to the host's memory
        self._spaces = [FileRoom(file) for file in files]
        self._stripe = stripe
        self._out: set[Extent] = set()
        self._left = 0  # bytes whose memory others hold
        self._is_over = False
        self._lock = threading.RLock()  # the last reference may go while it is held

    @property
    def held(self) -> int:
        """Bytes of the files."""
        return sum(space.file.length for space in self._spaces)

    def prepare(self, nbytes: int) -> None:
        """Reserve room for so many bytes; what rounding to pages adds is reserved as it is taken."""
        with self._lock:
            for space in self._spaces:
                space.prepare(nbytes // len(self._spaces))

    def take_all(self, sizes: Sequence[int]) -> list[Extent]:
        """All of them; where there is no room for all, none."""
        taken: list[Extent] = []
        try:
            for nbytes in sizes:
                taken.append(self._take(nbytes))
        except (OverBudget, DiskError):
            for extent in taken:
                self.give(extent)
            raise
        return taken

    def _take(self, nbytes: int) -> Extent:
        with self._lock:
            if self.capacity is not None and self.used + nbytes > self.capacity:
                raise OverBudget(
                    f"the memory `{self.tier}` holds {format_bytes(self.used)} and cannot take {format_bytes(nbytes)} more: "
                    f"its capacity is {format_bytes(self.capacity)}",
                    hint=f"give `{self.tier}` a larger budget, as in budget={{'{self.tier}': '64GiB'}}",
                )
            extent = Extent(nbytes, self._stripe, self._parts(nbytes))
            self._out.add(extent)
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            return extent

    def _parts(self, nbytes: int) -> tuple[tuple[FileRoom, int, int], ...]:
        parts: list[tuple[FileRoom, int, int]] = []
        try:
            for space, size in self._shares(nbytes):
                parts.append((space, space.take(size), size))
        except DiskError:
            _let_go(parts)
            raise
        return tuple(parts)

    def _shares(self, nbytes: int) -> Iterator[tuple[FileRoom, int]]:
        """How many bytes of an extent lie in each file; one that is shorter than a stripe lies in the file with the least."""
        if nbytes <= self._stripe:
            yield min(self._spaces, key=lambda space: space.file.length), nbytes
            return
        turn = self._stripe * len(self._spaces)
        for n, space in enumerate(self._spaces):
            rest = nbytes % turn - n * self._stripe
            size = nbytes // turn * self._stripe + min(max(rest, 0), self._stripe)
            if size:
                yield space, size

    def give(self, extent: Extent) -> None:
        with self._lock:
            if extent not in self._out:
                return  # void since `clear`
            self._out.remove(extent)
            self.used -= extent.nbytes
            _let_go(extent.parts)
            _forget(extent)

    def leave(self, extent: Extent) -> None:
        """Leave it to those that hold its memory: its room is given back when the last of them lets go, files or no files."""
        if extent.place is None:
            self.give(extent)
            return
        with self._lock:
            self._out.discard(extent)
            self._left += extent.nbytes
            _forget(extent)
            weakref.finalize(extent.place, self._was_left, extent.parts, extent.nbytes)
            extent.mapped = extent.place = None

    def _was_left(self, parts: Sequence[tuple[FileRoom, int, int]], nbytes: int) -> None:
        with self._lock:
            if not self._is_over:
                self.used -= nbytes
                self._left -= nbytes
                _let_go(parts)

    def begin_anew(self) -> None:
        """What is out becomes void; the files stay as long as they are. The peak is counted from here on."""
        with self._lock:
            for extent in self._out:
                _let_go(extent.parts)
                _forget(extent)
            self._out.clear()
            self.used = self.peak = self._left

    def clear(self) -> None:
        """Remove the files."""
        with self._lock:
            for extent in self._out:
                _forget(extent)
            self._out.clear()
            self.used = 0
            self._is_over = True
            for space in self._spaces:
                space.file.close()


def _forget(extent: Extent) -> None:
    if extent.mapped is not None:
        _mapped.pop(extent.mapped.data_ptr(), None)


def _let_go(parts: Sequence[tuple[FileRoom, int, int]]) -> None:
    for space, offset, size in parts:
        space.give(offset, size)
