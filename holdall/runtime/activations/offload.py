"""Offloads saved tensors of a block to another tier until backward needs them: all of them, or parts that a plan names.

Saved tensors are grouped by storage (several may be views of one). Those of one part are copied out after the block's forward
and fetched together, either prefetched or at the first unpack in backward. Parameters, the block's outputs and inputs that
other blocks use stay on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_iter

from holdall.runtime.activations.recompute import Input, RecomputedCall, unpack
from holdall.runtime.activations.resident import CallSaves
from holdall.runtime.budget.ledger import Ledger
from holdall.sharded import from_local, is_shard, local_of, spec_of
from holdall.tiers import Store, Ticket

Forward = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class OffloadedPart:
    """Tensors of a block that leave and return together. The default: all that the block makes, and none of its inputs."""

    saves: frozenset[int] | None = None  # numbers of saved tensors; by a program: of tensors that the forward makes; None: all
    inputs: frozenset[int] = frozenset()  # positions of inputs that the block alone needs
    lag: bool = False  # free the device's copies when the next block is over
    until: str = ""  # or when this one is
    fetch: str = ""  # block at whose backward to begin fetching; empty: at first use
    tier: str = ""  # destination; empty: the nearest tier
    least: int = 0  # elements; smaller tensors stay

    def names(self, position: int | None, number: int | None) -> bool:
        """Is the input at this position, or the save of this number if it is none of the block's inputs, in the part?"""
        return position in self.inputs if position is not None else self.saves is None or number in self.saves

    def group(self, store: Store, bank: Bank) -> OffloadedGroup:
        """For the tensors of one block call."""
        return OffloadedGroup(store, bank, self)


class OffloadedEntry:
    """One storage: on the device, offloaded, or fetched again. Without a group it stays on the device."""

    __slots__ = ("__weakref__", "group", "storage", "ticket")

    def __init__(self, storage: torch.UntypedStorage, group: OffloadedGroup | None = None) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.ticket: Ticket | None = None
        self.group = group

    def leaving(self) -> torch.UntypedStorage:
        """The bytes to copy out."""
        assert self.storage is not None
        return self.storage

    def fetch(self) -> torch.UntypedStorage:
        if self.group is not None and (self.storage is None or self.ticket is not None):
            self.group.fetch()
            self.group.arrive()
        assert self.storage is not None
        return self.storage

    def __del__(self) -> None:
        if self.group is not None and self.ticket is not None:  # backward never ran
            self.group.store.free(self.ticket)


class OffloadedGroup:
    """The storages of one part of a block call. Only autograd holds the entries, so backward frees each as it releases it."""

    entry_class: ClassVar[type[OffloadedEntry]] = OffloadedEntry

    def __init__(self, store: Store, bank: Bank, part: OffloadedPart) -> None:
        self.store = store
        self.bank = bank
        self.part = part
        self.entries: list[weakref.ref[OffloadedEntry]] = []
        self._arriving: list[weakref.ref[OffloadedEntry]] = []

    def leave(self, entries: Sequence[OffloadedEntry]) -> None:
        """Start the copies to the tier. Without `lag` the device memory is freed at once, otherwise by `let_go`."""
        tickets = self.bank.put_all(self.store, [entry.leaving() for entry in entries])
        for entry, ticket in zip(entries, tickets, strict=True):
            entry.ticket = ticket
            self.entries.append(weakref.ref(entry))
        if not self.part.lag:
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

    def uncounted(self) -> AbstractContextManager[None]:
        """Memory that is taken inside is not counted."""
        return self._ledger.paused() if self._ledger is not None else nullcontext()

    def count(self, storage: torch.UntypedStorage, what: str) -> None:
        """Count a storage on the device from here on."""
        if self._ledger is not None:
            self._ledger.see(storage, what)

    def put_all(self, store: Store, storages: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        with self.uncounted():
            return store.put_all(storages)

    def get_all(self, store: Store, tickets: Sequence[Ticket], device: torch.device) -> list[torch.UntypedStorage]:
        with self.uncounted():
            storages = store.get_all(tickets, device)
        for storage in storages:
            self.count(storage, "fetch")
        return storages


class _Parked:
    """Stands for a saved tensor in autograd's graph: a view of an entry."""

    __slots__ = ("entry", "like")

    def __init__(self, entry: OffloadedEntry, tensor: torch.Tensor) -> None:
        self.entry = entry
        self.like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def tensor(self) -> torch.Tensor:
        dtype, shape, stride, offset = self.like
        storage = self.entry.fetch()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


class _ParkedShard:
    """Stands for a saved DTensor: whatever holds this rank's part, and how it is spread."""

    __slots__ = ("held", "spec")

    def __init__(self, held: Any, spec: Any) -> None:
        self.held, self.spec = held, spec

    def tensor(self) -> torch.Tensor:
        return from_local(unpack(self.held), self.spec)


class OffloadedSaves:
    """Groups the saved tensors of one block call by storage and offloads those of its parts.

    A storage belongs to the part that names one of its saves. `saves`: of this call; some are never offloaded.
    """

    def __init__(self, groups: Sequence[OffloadedGroup], arguments: Any, saves: CallSaves) -> None:
        self.groups = groups
        self._saves = saves
        self._inputs = {key: position for position, key in enumerate(storages_of(arguments))}
        self._entries: dict[int, OffloadedEntry] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """The placeholder for the next tensor that autograd saves; `unpack` returns the tensor."""
        return self.take(tensor, self._saves.number(tensor))

    def take(self, tensor: torch.Tensor, number: int | None) -> Any:
        """The placeholder for the tensor of this number; None: it has none, such as one that the block does not make."""
        if is_shard(tensor):
            return _ParkedShard(self.take(local_of(tensor), number), spec_of(tensor))
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._saves.stays(key) or storage.device.type != self.groups[0].store.device.type:
            return tensor  # such as the random seed that attention keeps on the host
        group = self._group(tensor, number)
        if group is None and key in self._inputs:
            return tensor
        entry = self._entries.setdefault(key, (group.entry_class if group is not None else OffloadedEntry)(storage))
        entry.group = entry.group or group
        return _Parked(entry, tensor)

    def _group(self, tensor: torch.Tensor, number: int | None) -> OffloadedGroup | None:
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        position = self._inputs.get(storage._cdata)
        return next((g for g in self.groups if elements >= g.part.least and g.part.names(position, number)), None)

    def add(self, entry: OffloadedEntry) -> None:
        """Let an entry leave with its group that stands for no saved tensor."""
        assert entry.storage is not None
        self._entries[entry.storage._cdata] = entry

    def leave(self, out: Any, call: RecomputedCall | None = None) -> None:
        """After the block's forward: offload the parts, except for the block's outputs. `call`: a recomputed call, whose inputs
        leave, too."""
        outputs = set(storages_of(out))
        if call is not None:
            outputs -= self._park_inputs(call)
        for group in self.groups:
            group.leave([e for key, e in self._entries.items() if e.group is group and key not in outputs])
        self._entries = {}  # autograd keeps `pack` alive as long as any saved tensor of the block

    def _park_inputs(self, call: RecomputedCall) -> set[int]:
        """Take the inputs of a recomputed call from their entries in its replay. Returns their storages."""
        parked: set[int] = set()
        for item in call.inputs:
            if not isinstance(item, Input):
                continue
            tensor = item.tensor
            if tensor is None or is_shard(tensor) or tensor.device.type != self.groups[0].store.device.type:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            group = self._group(tensor, None) if key in self._inputs else None
            if group is not None:
                entry = self._entries.setdefault(key, OffloadedEntry(storage))
                entry.group = group
                item.park(entry.fetch)
                parked.add(key)
        return parked


def offload_saved(saves: OffloadedSaves, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Run a block's forward and offload what autograd saves."""
    with torch.autograd.graph.saved_tensors_hooks(saves.pack, unpack):
        out = forward(*args, **kwargs)
    saves.leave(out)
    return out


def storages_of(value: Any) -> list[int]:
    """The storages of the tensors in nested arguments or results, each once."""
    return list(dict.fromkeys(local_of(t).untyped_storage()._cdata for t in tree_iter(value) if isinstance(t, torch.Tensor)))
