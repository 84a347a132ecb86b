"""Copies feature maps of a block to another tier while the block computes.

Inputs leave when the block begins, other saved tensors as soon as autograd saves them; or all of them later, together. Blocks
that hold an input of a later block lend it (`lent`): both refer to one entry, so that one copy leaves and comes back for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch.utils._pytree import tree_leaves

from holdall.codecs.csr import decode_csr, encode_csr
from holdall.runtime.activations.offload import Bank, Forward, OffloadedEntry, OffloadedGroup, OffloadedPart, _Parked
from holdall.runtime.activations.recompute import RecomputedCall, unpack
from holdall.runtime.activations.resident import CallSaves
from holdall.tiers import Store

Lent = WeakValueDictionary[int, OffloadedEntry]
"""Entries that are on the device, by their storage; only autograd holds them."""


@dataclass(frozen=True, kw_only=True)
class SwapPolicy:
    """What leaves with a block, and when; see `actions/layer_swap.py`. A block may have several."""

    inputs: frozenset[int] = frozenset()  # by position, counted by storage
    early: frozenset[int] = frozenset()  # numbers of the saves whose tensors leave
    made: frozenset[int] = frozenset()  # by a program: numbers of the tensors that leave, among those that the forward makes
    begin: str = ""  # block after whose forward the copies begin; empty: at once
    until: str  # block after whose forward the device's copies are freed
    fetch: str = ""  # block at whose backward to begin fetching; empty: at first use
    arrive: str = ""  # block whose backward waits for what is fetched; empty: whoever needs it
    tier: str = ""  # destination; empty: the nearest tier
    width: int = 0  # bytes of the words that are packed where they are not zero; 0: bytes leave as they are


class SwappedPart:
    """Tensors of one block call that leave and return together. None leaves before `depart` is called if the policy says so."""

    def __init__(self, group: OffloadedGroup, policy: SwapPolicy) -> None:
        self.group, self.policy = group, policy
        self.chosen: dict[OffloadedEntry, None] = {}  # held until the copies begin: autograd may not hold them yet
        self.kept: list[OffloadedEntry] = []  # by a program, until its forward is over

    def choose(self, entries: Sequence[OffloadedEntry]) -> None:
        """Let these leave, at once if they may."""
        self.chosen |= dict.fromkeys(entries)
        if not self.policy.begin:
            self.send(entries)

    def send(self, entries: Sequence[OffloadedEntry]) -> None:
        for entry in entries:
            entry.group = self.group
        self.group.leave(entries)

    def depart(self) -> None:
        """Start the copies, if they have not begun; autograd holds what was saved from here on."""
        if self.policy.begin:
            self.send(list(self.chosen))
        self.chosen = {}


class SparseGroup(OffloadedGroup):
    """Storages leave as their words that are not zero (`codecs/csr.py`), and are whole again when they have arrived."""

    def __init__(self, store: Store, bank: Bank, part: OffloadedPart, width: int) -> None:
        super().__init__(store, bank, part)
        self._width = width
        self._codes: list[torch.UntypedStorage] = []  # on the device until they are out
        self._sizes: WeakKeyDictionary[OffloadedEntry, int] = WeakKeyDictionary()

    def leave(self, entries: Sequence[OffloadedEntry]) -> None:
        for entry in entries:
            whole = entry.leaving()
            self._sizes[entry] = whole.nbytes()
            with self.bank.uncounted(), torch.no_grad():
                codes = encode_csr(bytes_in(whole), self._width).untyped_storage()
            self.bank.count(codes, "encode")
            (entry.ticket,) = self.bank.put_all(self.store, [codes])
            self._codes.append(codes)
            self.entries.append(ref(entry))

    def let_go(self) -> None:
        super().let_go()
        self._codes = []

    def arrive(self) -> None:
        here = [entry for reference in self._arriving if (entry := reference()) is not None]
        super().arrive()
        for entry in here:
            assert entry.storage is not None
            with self.bank.uncounted(), torch.no_grad():
                whole = decode_csr(bytes_in(entry.storage), self._sizes[entry], self._width).untyped_storage()
            self.bank.count(whole, "decode")
            entry.storage = whole


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class SwappedSaves:
    """The saved tensors of one block call: those of its parts, which leave, and others that can be lent."""

    def __init__(self, parts: Sequence[SwappedPart], lent: Lent, saves: CallSaves) -> None:
        self.parts = parts
        self._lent, self._saves = lent, saves

    def begin(self, arguments: Any) -> None:
        """Choose the inputs that leave, and start their copies if they may begin."""
        storages: dict[int, torch.UntypedStorage] = {}
        for t in tree_leaves(arguments):
            if isinstance(t, torch.Tensor):
                storages.setdefault(t.untyped_storage()._cdata, t.untyped_storage())
        for part in self.parts:
            own = [s for position, s in enumerate(storages.values()) if position in part.policy.inputs and not self._stays(s)]
            part.choose([self._entry(storage) for storage in own])

    def pack(self, tensor: torch.Tensor) -> Any:
        """The placeholder for a tensor; `unpack` returns the tensor."""
        number, storage = self._saves.number(tensor), tensor.untyped_storage()
        if self._stays(storage):
            return tensor
        entry = self._entry(storage)
        for part in self.parts:
            if number in part.policy.early and entry not in part.chosen:
                part.choose([entry])
        return _Parked(entry, tensor)

    def take(self, tensor: torch.Tensor, number: int | None) -> Any:
        """The placeholder for a tensor that a program keeps. `number`: of those that the block makes."""
        storage = tensor.untyped_storage()
        if self._stays(storage):
            return tensor
        entry = self._entry(storage)
        for part in self.parts:
            if number in part.policy.made:
                part.kept.append(entry)
        return _Parked(entry, tensor)

    def leave(self, _out: Any, _call: RecomputedCall | None = None) -> None:
        """After the forward of a block that runs by a program: start the copies of what it makes, if they may begin."""
        for part in self.parts:
            part.choose(part.kept)
            part.kept = []

    def _stays(self, storage: torch.UntypedStorage) -> bool:
        return self._saves.stays(storage._cdata) or storage.device.type != self.parts[0].group.store.device.type

    def _entry(self, storage: torch.UntypedStorage) -> OffloadedEntry:
        key = storage._cdata
        entry = self._lent.get(key)
        if entry is None or entry.storage is None or entry.storage._cdata != key:  # an address may be used again
            entry = self._lent[key] = OffloadedEntry(storage, self.parts[0].group)
        return entry


def swap_saved(saves: SwappedSaves, forward: Forward, args: Any, kwargs: Any) -> Any:
    """Run a block's forward while feature maps leave."""
    saves.begin((args, kwargs))
    with torch.autograd.graph.saved_tensors_hooks(saves.pack, unpack):
        return forward(*args, **kwargs)
