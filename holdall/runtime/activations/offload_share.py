"""Offloads so many bytes of a block's saved tensors; the tensor at the boundary is split.

    forward    the tail of the split storage is cloned; whole storages and the head are copied out together
    backward   memory for the whole storage is taken, the tail is copied into it, and the head is fetched into its place

Storages beyond the boundary are never touched. Ownership is as for `offload`: only autograd holds the entries.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from holdall.runtime.activations.offload import Bank, OffloadedEntry, OffloadedGroup, OffloadedPart
from holdall.tiers import Keeper, Store, let_wait
from holdall.types.layout import leading_bytes


@dataclass(frozen=True, kw_only=True)
class SharePart(OffloadedPart):
    """The bytes of a block's saved tensors that leave, as the first of a string of bytes."""

    nbytes: int
    smallest_first: bool  # the order of the tensors in the string; otherwise the largest come first
    least_bytes: int  # smaller tensors are not in the string

    def group(self, store: Store, bank: Bank) -> OffloadedGroup:
        return ShareGroup(store, bank, self)


class ShareEntry(OffloadedEntry):
    """One storage, of which the first `cut` bytes leave; 0: all of them, if any."""

    __slots__ = ("_coming", "_nbytes", "cut", "tail")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)
        self.cut = 0
        self.tail: torch.Tensor | None = None  # bytes that stay, while the storage is away
        self._nbytes = storage.nbytes()
        self._coming: Any = None  # event: the head is there

    def leaving(self) -> torch.UntypedStorage:
        whole = super().leaving()
        return whole[: self.cut] if self.cut else whole

    def divide(self, bank: Bank) -> None:
        """Clone the tail."""
        with bank.uncounted():
            self.tail = _bytes(super().leaving())[self.cut :].clone()
        bank.count(self.tail.untyped_storage(), "clone a tail")

    def join(self, store: Store, bank: Bank) -> None:
        """Take memory for the whole storage, put the tail back and start fetching the head."""
        assert self.tail is not None and self.ticket is not None
        with bank.uncounted():
            whole = torch.UntypedStorage(self._nbytes, device=store.device)
        bank.count(whole, "fetch")
        with bank.uncounted():
            memory = _bytes(whole)
            memory[self.cut :].copy_(self.tail)
            self.tail = None
            self._coming = cast(Keeper, store).pull(self.ticket, memory[: self.cut])
        self.storage = whole

    def arrive(self) -> None:
        """Make the current stream wait for the head."""
        if self._coming is not None and self.group is not None:
            let_wait(self._coming, self.group.store.device)
            self._coming = None

    def __del__(self) -> None:
        self.arrive()
        super().__del__()


class ShareGroup(OffloadedGroup):
    """The storages of one block call of which all or some bytes leave."""

    entry_class = ShareEntry

    def leave(self, entries: Sequence[OffloadedEntry]) -> None:
        part = self.part
        assert isinstance(part, SharePart)
        entries = [entry for entry in entries if entry.leaving().nbytes() >= part.least_bytes]
        sizes = [entry.leaving().nbytes() for entry in entries]
        leading = leading_bytes(sizes, part.nbytes, smallest_first=part.smallest_first)
        for entry, size, head in zip(entries, sizes, leading, strict=True):
            if isinstance(entry, ShareEntry) and 0 < head < size:
                entry.cut = head
                entry.divide(self.bank)
        super().leave([entry for entry, head in zip(entries, leading, strict=True) if head])

    def fetch(self) -> None:
        self.let_go()
        here = [entry for reference in self.entries if (entry := reference()) is not None]
        split = [e for e in here if isinstance(e, ShareEntry) and e.tail is not None and e.ticket is not None]
        self.entries = [weakref.ref(e) for e in here if e not in split]
        del here
        super().fetch()
        for entry in split:
            entry.join(self.store, self.bank)
            self._arriving.append(weakref.ref(entry))

    def arrive(self) -> None:
        for reference in self._arriving:
            entry = reference()
            if isinstance(entry, ShareEntry):
                entry.arrive()
        super().arrive()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
