"""Host memory in buffers of exact size, kept for reuse by size, and counted to the byte.

The buffers are anonymous mappings: PyTorch's allocators never see them, none is rounded up to a power of two as its pinned
allocator does, and one that is let go returns to the system. A training step asks for the same sizes every time, so that after
the first step every request is served from those kept; touching fresh pages costs more than the copy itself.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdall.errors import OverBudget
from holdall.tiers._chaos import current
from holdall.units import MiB, format_bytes


@dataclass(slots=True, eq=False)
class Buffer:
    nbytes: int
    storage: torch.UntypedStorage
    busy: Any = None  # event after which it may be overwritten; None: now
    is_pinned: bool = False


def _nothing(buffer: Buffer) -> None:
    """A buffer needs no care."""


class Buffers:
    """Takes buffers and gives them back; never holds more than `capacity` bytes (None: no end)."""

    def __init__(
        self,
        tier: str,
        capacity: int | None,
        *,
        prepare: Callable[[Buffer], None] = _nothing,
        dispose: Callable[[Buffer], None] = _nothing,
    ) -> None:
        self.tier = tier
        self.capacity = capacity
        self.used = 0
        self.peak = 0
        self.held = 0
        self.sent = self.fetched = 0  # bytes copied into buffers, and out of them
        self.saved = self.loaded = 0  # the same, from and to the host's memory
        self._prepare = prepare  # after a buffer is made
        self._dispose = dispose  # before its memory goes
        self._kept: dict[int, deque[Buffer]] = {}  # by size; oldest first, for its copies are the most likely to be over
        self._out: set[Buffer] = set()  # so that memory in use by a copy outlives a caller that lost its ticket

    def take(self, nbytes: int, *, prepare: bool = True) -> Buffer:
        kept = self._kept.get(nbytes)
        buffer = kept.popleft() if kept else self._make(nbytes, prepare)
        self._out.add(buffer)
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        chaos = current()
        if chaos is not None:
            be_idle(buffer)
            chaos.poison(bytes_of(buffer.storage))
        return buffer

    def take_all(self, sizes: Sequence[int]) -> list[Buffer]:
        """All of them; where there is no room for all, none."""
        taken: list[Buffer] = []
        try:
            for nbytes in sizes:
                taken.append(self.take(nbytes))
        except OverBudget:
            for buffer in taken:
                self.give(buffer)
            raise
        return taken

    def give(self, buffer: Buffer) -> None:
        if buffer not in self._out:
            return  # void since `clear`
        self._out.remove(buffer)
        chaos = current()
        if chaos is not None and buffer.busy is None:
            chaos.poison(bytes_of(buffer.storage))
        self.used -= buffer.nbytes
        self._kept.setdefault(buffer.nbytes, deque()).append(buffer)

    def begin_anew(self) -> None:
        """What is out becomes void, what is kept stays at hand; the peak is counted from here on."""
        for buffer in self._out:
            self._drop(buffer)
        self._out.clear()
        self.used = self.peak = 0

    def clear(self) -> None:
        """Let go of everything, what is out included."""
        for buffer in self._out:
            self._drop(buffer)
        self._out.clear()
        self.used = 0
        self.trim(0)

    def trim(self, most: int) -> None:
        """Let go of kept buffers, largest first, until at most `most` bytes are held."""
        for size in sorted(self._kept, reverse=True):
            kept = self._kept[size]
            while kept and self.held > most:
                buffer = kept.popleft()
                be_idle(buffer)
                self._drop(buffer)
            if not kept:
                del self._kept[size]

    def _make(self, nbytes: int, prepare: bool = True) -> Buffer:
        if self.capacity is not None and self.held + nbytes > self.capacity:
            self.trim(self.capacity - nbytes)
            if self.held + nbytes > self.capacity:
                raise self._over(nbytes, f"its capacity is {format_bytes(self.capacity)}")
        try:
            mapping = _map(nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise self._over(nbytes, f"the system refuses ({error})") from error
        buffer = Buffer(nbytes, torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage())  # which owns the mapping
        if prepare:
            self._prepare(buffer)
        self.held += nbytes
        return buffer

    def _drop(self, buffer: Buffer) -> None:
        self._dispose(buffer)
        self.held -= buffer.nbytes

    def _over(self, nbytes: int, why: str) -> OverBudget:
        return OverBudget(
            f"the memory `{self.tier}` holds {format_bytes(self.used)} and cannot take {format_bytes(nbytes)} more: {why}",
            hint=f"give `{self.tier}` a larger budget, as in budget={{'{self.tier}': '64GiB'}}",
        )


def _map(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2 * MiB and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # first touch by 2 MiB pages: half the time or less
    return mapping


def be_idle(buffer: Buffer) -> None:
    """The host waits until no copy reads the buffer."""
    if buffer.busy is not None:
        buffer.busy.synchronize()
        buffer.busy = None


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes; no dispatch mode sees it made."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copy_tensor(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy a tensor, or of two flat ones as much as the shorter holds, without any dispatch mode seeing it."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        if target.dim() == source.dim() == 1 and target.numel() != source.numel():
            n = min(target.numel(), source.numel())
            target, source = target[:n], source[:n]
        target.copy_(source, non_blocking=non_blocking)


def touch(memory: torch.Tensor) -> None:
    """Have the system give the pages of fresh memory, by all threads; no dispatch mode sees it."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        memory.zero_()


def copy_bytes(target: torch.UntypedStorage, source: torch.UntypedStorage, *, non_blocking: bool = False) -> None:
    """Copy a storage without any dispatch mode seeing it."""
    with torch._C._DisableTorchDispatch():
        target.copy_(source, non_blocking=non_blocking)
