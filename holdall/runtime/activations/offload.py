"""Offloads the saved tensors of a block to another tier until backward needs them.

Saved tensors are grouped by storage (several may be views of one), copied out after the block's forward, and fetched together,
either prefetched or at the first unpack in backward. Parameters, the block's outputs and inputs that other blocks use stay on
the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_leaves

from holdall.runtime.activations.recompute import Input, RecomputedCall
from holdall.runtime.budget.ledger import Ledger
from holdall.tiers import Store, Ticket

Forward = Callable[..., Any]


class OffloadedEntry:
    """One storage: on the device, offloaded, or fetched again."""

    __slots__ = ("__weakref__", "group", "storage", "ticket")

    def __init__(self, storage: torch.UntypedStorage, group: OffloadedGroup) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.ticket: Ticket | None = None
        self.group = group

    def fetch(self) -> torch.UntypedStorage:
        if self.storage is None or self.ticket is not None:
            self.group.fetch()
            self.group.arrive()
        assert self.storage is not None
        return self.storage

    def __del__(self) -> None:
        if self.ticket is not None:  # backward never ran
            self.group.store.free(self.ticket)


class OffloadedGroup:
    """The storages that one block call offloads. Only autograd holds the entries, so backward frees each as it releases it."""

    def __init__(self, store: Store, bank: Bank, lag: bool) -> None:
        self.store = store
        self.bank = bank
        self.lag = lag
        self.entries: list[weakref.ref[OffloadedEntry]] = []
        self._arriving: list[weakref.ref[OffloadedEntry]] = []

    def leave(self, entries: Sequence[OffloadedEntry]) -> None:
        """Start the copies to the tier. Without `lag` the device memory is freed at once, otherwise by `let_go`."""
        tickets = self.bank.put_all(self.store, [entry.storage for entry in entries if entry.storage is not None])
        for entry, ticket in zip(entries, tickets, strict=True):
            entry.ticket = ticket
            self.entries.append(weakref.ref(entry))
        if not self.lag:
            self.let_go()

    def let_go(self) -> None:
        """Make the current stream wait for the copies and free the device memory."""
        for reference in self.entries:
            entry = reference()
            if entry is not None and entry.ticket is not None and entry.storage is not None:
                self.store.wait(entry.ticket)
                entry.storage = None

    def fetch(self) -> None:
        """Start fetching everything that is still offloaded."""
        self.let_go()
        here = [entry for reference in self.entries if (entry := reference()) is not None]
        away = [entry for entry in here if entry.ticket is not None and entry.storage is None]
        tickets = [entry.ticket for entry in away if entry.ticket is not None]
        storages = self.bank.get_all(self.store, tickets, self.store.device)
        for entry, storage in zip(away, storages, strict=True):
            entry.storage = storage
            self._arriving.append(weakref.ref(entry))
        self.entries = []

    def arrive(self) -> None:
        """Make the current stream wait for the fetches."""
        for reference in self._arriving:
            entry = reference()
            if entry is not None and entry.ticket is not None:
                self.store.wait_in(entry.ticket)
                self.store.free(entry.ticket)
                entry.ticket = None
        self._arriving = []


class Bank:
    """Copies between the device and a tier. The ledger, if there is one, counts the device side."""

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger

    def put_all(self, store: Store, storages: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        with self._ledger.paused() if self._ledger is not None else nullcontext():
            return store.put_all(storages)

    def get_all(self, store: Store, tickets: Sequence[Ticket], device: torch.device) -> list[torch.UntypedStorage]:
        if self._ledger is None:
            return store.get_all(tickets, device)
        with self._ledger.paused():
            storages = store.get_all(tickets, device)
        for storage in storages:
            self._ledger.see(storage, "fetch")
        return storages


class _Parked:
    """Stands for a saved tensor in autograd's graph: a view of an entry."""

    __slots__ = ("entry", "like")

    def __init__(self, entry: OffloadedEntry, tensor: torch.Tensor) -> None:
        self.entry = entry
        self.like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def unpack(held: Any) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        return held
    dtype, shape, stride, offset = held.like
    storage = held.entry.fetch()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


class OffloadedSaves:
    """Groups the saved tensors of one block call by storage and offloads them.

    `inputs`: the positions of the input tensors (counted by storage) that belong to this block alone. `stay`: storages that are
    never offloaded.
    """

    def __init__(self, group: OffloadedGroup, arguments: Any, inputs: frozenset[int], stay: Callable[[int], bool]) -> None:
        self.group = group
        self.inputs = inputs
        self._stay = stay
        self._shared = shared_inputs(arguments, inputs)
        self._entries: dict[int, OffloadedEntry] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """The placeholder for a tensor; `unpack` returns the tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._stay(key) or key in self._shared or storage.device.type != self.group.store.device.type:
            return tensor  # such as the random seed that attention keeps on the host
        if key not in self._entries:
            self._entries[key] = OffloadedEntry(storage, self.group)
        return _Parked(self._entries[key], tensor)

    def leave(self, out: Any) -> None:
        """After the block's forward: offload everything packed except the block's outputs."""
        outputs = {t.untyped_storage()._cdata for t in tree_iter(out) if isinstance(t, torch.Tensor)}
        self.group.leave([entry for key, entry in self._entries.items() if key not in outputs])
        self._entries = {}  # autograd keeps `pack` alive as long as any saved tensor of the block


def park_saved(parking: OffloadedSaves, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Run a block's forward and offload what autograd saves."""
    with torch.autograd.graph.saved_tensors_hooks(parking.pack, unpack):
        out = forward(*args, **kwargs)
    parking.leave(out)
    return out


def park_inputs(group: OffloadedGroup, call: RecomputedCall, inputs: frozenset[int]) -> None:
    """Offload the inputs that a recomputed call keeps for its replay."""
    seen: dict[int, list[Input]] = {}
    for item in call.inputs:
        if isinstance(item, Input):
            storage = item.storage()
            if storage is not None and storage.device.type == group.store.device.type:
                seen.setdefault(storage._cdata, []).append(item)
    entries = []
    for position, items in enumerate(seen.values()):
        if position in inputs:
            storage = items[0].storage()
            assert storage is not None
            entry = OffloadedEntry(storage, group)
            entries.append(entry)
            for item in items:
                item.park(entry.fetch)
    group.leave(entries)


def shared_inputs(arguments: Any, own: frozenset[int]) -> set[int]:
    """Storages of a block's inputs except those at the positions `own`."""
    order: dict[int, None] = {}
    for t in tree_leaves(arguments):
        if isinstance(t, torch.Tensor):
            order[t.untyped_storage()._cdata] = None
    return {key for position, key in enumerate(order) if position not in own}
