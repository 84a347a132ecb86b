"""Copies feature maps of a block to another tier while the block computes.

Inputs leave when the block begins, other saved tensors as soon as autograd saves them; or all of them later, together. Blocks
that hold an input of a later block lend it (`lent`): both refer to one entry, so that one copy leaves and comes back for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_leaves

from holdall.runtime.activations.offload import Forward, OffloadedEntry, OffloadedGroup, _Parked
from holdall.runtime.activations.recompute import unpack

Lent = WeakValueDictionary[int, OffloadedEntry]
"""Entries that are on the device, by their storage; only autograd holds them."""


@dataclass(frozen=True, kw_only=True)
class SwapPolicy:
    """What leaves with a block, and when; see `actions/layer_swap.py`."""

    inputs: frozenset[int] = frozenset()  # by position, counted by storage
    early: frozenset[int] = frozenset()  # numbers of the saves whose tensors leave
    begin: str = ""  # block after whose forward the copies begin; empty: at once
    until: str  # block after whose forward the device's copies are freed
    fetch: str = ""  # block at whose backward to begin fetching; empty: at first use
    arrive: str = ""  # block whose backward waits for what is fetched; empty: whoever needs it
    tier: str = ""  # destination; empty: the nearest tier


class SwappedSaves:
    """The saved tensors of one block call: those that leave, and others that can be lent. None leaves before `depart` is called
    if the policy says so."""

    def __init__(self, group: OffloadedGroup, policy: SwapPolicy, lent: Lent, stay: Callable[[int], bool]) -> None:
        self.group = group
        self._policy, self._lent, self._stay = policy, lent, stay
        self._count = 0
        self._chosen: dict[OffloadedEntry, None] = {}  # held until the copies begin: autograd may not hold them yet

    def begin(self, arguments: Any) -> None:
        """Choose the inputs that leave, and start their copies if they may begin."""
        storages: dict[int, torch.UntypedStorage] = {}
        for t in tree_leaves(arguments):
            if isinstance(t, torch.Tensor):
                storages.setdefault(t.untyped_storage()._cdata, t.untyped_storage())
        own = [s for position, s in enumerate(storages.values()) if position in self._policy.inputs and not self._stays(s)]
        for storage in own:
            self._chosen[self._entry(storage)] = None
        if not self._policy.begin:
            self._send(list(self._chosen))

    def pack(self, tensor: torch.Tensor) -> Any:
        """The placeholder for a tensor; `unpack` returns the tensor."""
        number, storage = self._count, tensor.untyped_storage()
        self._count += 1
        if self._stays(storage):
            return tensor
        entry = self._entry(storage)
        if number in self._policy.early and entry not in self._chosen:
            self._chosen[entry] = None
            if not self._policy.begin:
                self._send([entry])
        return _Parked(entry, tensor)

    def depart(self) -> None:
        """Start the copies, if they have not begun; autograd holds what was saved from here on."""
        if self._policy.begin:
            self._send(list(self._chosen))
        self._chosen = {}

    def _stays(self, storage: torch.UntypedStorage) -> bool:
        return self._stay(storage._cdata) or storage.device.type != self.group.store.device.type

    def _entry(self, storage: torch.UntypedStorage) -> OffloadedEntry:
        key = storage._cdata
        entry = self._lent.get(key)
        if entry is None or entry.storage is None or entry.storage._cdata != key:  # an address may be used again
            entry = self._lent[key] = OffloadedEntry(storage, self.group)
        return entry

    def _send(self, entries: list[OffloadedEntry]) -> None:
        for entry in entries:
            entry.group = self.group
        self.group.leave(entries)


def swap_saved(saves: SwappedSaves, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Run a block's forward while feature maps leave."""
    saves.begin((args, kwargs))
    with torch.autograd.graph.saved_tensors_hooks(saves.pack, unpack):
        return forward(*args, **kwargs)
