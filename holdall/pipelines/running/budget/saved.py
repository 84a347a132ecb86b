"""What autograd holds of a stage's micro-batches, layer by layer: kept, computed again, or offloaded; and the bytes of it.

    keep       what autograd saves
    recompute  the layer's input; its forward runs again in backward (`runtime/activations/recompute.py`)
    offload    nothing but outputs that are saved: the rest, the input included, is in the far tier until its backward
               (`runtime/activations/offload.py`)

Counted are distinct storages, without parameters, buffers and the stage's own input, which lies in the batch or in the buffer
that torch receives into, for the whole run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from holdall.parallel.parts import wrap
from holdall.runtime.activations.offload import Bank, OffloadedGroup, OffloadedPart, OffloadedSaves, storages_of
from holdall.runtime.activations.recompute import Input, Segment, unpack
from holdall.runtime.activations.resident import CallSaves
from holdall.runtime.budget.ledger import Ledger
from holdall.sharded import local_of
from holdall.tiers import Store

KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"


class HeldBytes:
    """Bytes of the distinct storages that are held, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.ledger: Ledger | None = None  # counts all that is on the device, in steps that are measured
        self._held: dict[int, list[int]] = {}  # storage -> [holders, bytes]

    def hold(self, storage: torch.UntypedStorage) -> int:
        """Count a storage until `drop` of what this returns has been called as often as this."""
        entry = self._held.setdefault(storage._cdata, [0, storage.nbytes()])
        if not entry[0]:
            self.now += entry[1]
            self.most = max(self.most, self.now)
        entry[0] += 1
        return int(storage._cdata)

    def drop(self, key: int) -> None:
        entry = self._held[key]
        entry[0] -= 1
        if not entry[0]:
            self.now -= entry[1]
            del self._held[key]

    def holds(self, key: int) -> bool:
        return key in self._held

    def restart(self) -> None:
        self.most = self.now

    # as the bank of offloaded tensors asks a ledger

    def see(self, storage: torch.UntypedStorage, what: str) -> None:
        """Count a storage for as long as it lives."""
        weakref.finalize(storage, self.drop, self.hold(storage))
        if self.ledger is not None:
            self.ledger.see(storage, what)

    def paused(self) -> AbstractContextManager[None]:
        return self.ledger.paused() if self.ledger is not None else nullcontext()


class CountedTensor:
    """Stands for a saved tensor, and counts its storage."""

    __slots__ = ("_bytes", "_key", "_tensor")

    def __init__(self, tensor: torch.Tensor, held: HeldBytes) -> None:
        self._tensor, self._bytes = tensor.detach(), held  # without its graph, which would hold itself
        self._key = held.hold(local_of(tensor).untyped_storage())

    def tensor(self) -> torch.Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._bytes.drop(self._key)


class CountedSegment(Segment):
    """A recomputed call that counts its inputs until its replay, and what that makes."""

    def __init__(self, held: HeldBytes, resident: set[int]) -> None:
        super().__init__()
        self._held, self._resident = held, resident
        self._inputs: list[CountedTensor] = []

    def count_inputs(self) -> None:
        found = [item.tensor for call in self.calls for item in call.inputs if isinstance(item, Input)]
        self._inputs = [CountedTensor(t, self._held) for t in found if t is not None and key_of(t) not in self._resident]

    def replay(self) -> None:
        promises = [p for call in self.calls for reference in call.promises.values() if (p := reference()) is not None]
        super().replay()
        for promise in promises:
            if promise.value is not None and key_of(promise.value) not in self._resident:
                weakref.finalize(promise, self._held.drop, self._held.hold(local_of(promise.value).untyped_storage()))
        self._inputs = []


class StageLayers:
    """Runs the layers of one stage, each in its way."""

    def __init__(
        self,
        module: torch.nn.Module,
        ways: Sequence[str],
        held: HeldBytes,
        store: Store,
        changed: Sequence[list[str]] | None,
    ) -> None:
        """`store`: where what is offloaded goes. `changed`: by layer, buffers that its forward changes; None: all may be."""
        self._held, self._store = held, store
        self._input: set[int] = set()  # storages of the stage's input, of the micro-batch that is computed
        for n, (layer, way) in enumerate(zip(module.children(), ways, strict=True)):
            buffers = dict(layer.named_buffers())
            state = list(buffers.values()) if changed is None else [buffers[name] for name in changed[n]]
            wrap(layer, self._runner(layer, way, state, is_first=n == 0))

    def _runner(self, layer: torch.nn.Module, way: str, state: list[torch.Tensor], *, is_first: bool) -> Callable[..., Any]:
        def forward(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            if is_first:
                self._input = set(storages_of((args, kwargs)))
            resident = self._input | own_storages(layer)
            if way == RECOMPUTE:
                segment = CountedSegment(self._held, resident)
                out, _ = segment.run(layer, plain, args, kwargs, state=state)
                segment.count_inputs()
                return out
            if way == OFFLOAD:
                return _offloaded(plain, args, kwargs, resident, self._held, self._store)
            return keep_counted(plain, args, kwargs, resident, self._held)

        return forward


def keep_counted(run: Callable[..., Any], args: Any, kwargs: Any, resident: set[int], held: HeldBytes) -> Any:
    """Run something and count what autograd saves of it."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.detach() if key_of(tensor) in resident else CountedTensor(tensor, held)

    with saved_tensors_hooks(pack, unpack):
        return run(*args, **kwargs)


def _offloaded(run: Callable[..., Any], args: Any, kwargs: Any, resident: set[int], held: HeldBytes, store: Store) -> Any:
    places = frozenset(range(len(storages_of((args, kwargs)))))
    ledger: Any = held
    group = OffloadedGroup(store, Bank(ledger), OffloadedPart(inputs=places))
    saves = OffloadedSaves([group], (args, kwargs), CallSaves(resident))
    parked: dict[int, tuple[Any, int]] = {}  # entries that were counted

    def pack(tensor: torch.Tensor) -> Any:
        found = saves.pack(tensor)
        if isinstance(found, torch.Tensor):
            return tensor.detach() if key_of(tensor) in resident else CountedTensor(tensor, held)
        if id(found.entry) not in parked:
            parked[id(found.entry)] = (found.entry, held.hold(tensor.untyped_storage()))
        return found

    with saved_tensors_hooks(pack, unpack):
        out = run(*args, **kwargs)
    saves.leave(out)
    for entry, key in parked.values():
        if entry.storage is None:
            held.drop(key)
        else:
            weakref.finalize(entry, held.drop, key)
    parked.clear()  # autograd keeps `pack`
    return out


def own_storages(module: torch.nn.Module) -> set[int]:
    """Of parameters and buffers, as they are during a call."""
    return {key_of(t) for t in itertools.chain(module.parameters(), module.buffers())}


def key_of(tensor: torch.Tensor) -> int:
    return int(local_of(tensor).untyped_storage()._cdata)
