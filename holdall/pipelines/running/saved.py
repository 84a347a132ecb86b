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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from holdall.parallel.parts import wrap
from holdall.pipelines.running.drawn import same_random
from holdall.pipelines.running.torch_names import backward_of_inputs
from holdall.runtime.activations.offload import Bank, OffloadedGroup, OffloadedPart, OffloadedSaves, storages_of
from holdall.runtime.activations.recompute import Input, Segment, unpack
from holdall.sharded import local_of
from holdall.tiers import Store

KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"


class HeldBytes:
    """Bytes of the distinct storages that are held, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
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

    def see(self, storage: torch.UntypedStorage, _: str) -> None:
        """Count a storage for as long as it lives."""
        weakref.finalize(storage, self.drop, self.hold(storage))

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield


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
        self._inputs = [CountedTensor(t, self._held) for t in found if t is not None and _key(t) not in self._resident]

    def replay(self) -> None:
        promises = [p for call in self.calls for reference in call.promises.values() if (p := reference()) is not None]
        super().replay()
        for promise in promises:
            if promise.value is not None and _key(promise.value) not in self._resident:
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
            resident = self._input | _own_storages(layer)
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
        return tensor.detach() if _key(tensor) in resident else CountedTensor(tensor, held)

    with saved_tensors_hooks(pack, unpack):
        return run(*args, **kwargs)


def _offloaded(run: Callable[..., Any], args: Any, kwargs: Any, resident: set[int], held: HeldBytes, store: Store) -> Any:
    places = frozenset(range(len(storages_of((args, kwargs)))))
    ledger: Any = held
    group = OffloadedGroup(store, Bank(ledger), OffloadedPart(inputs=places))
    saves = OffloadedSaves([group], (args, kwargs), resident.__contains__)
    parked: dict[int, tuple[Any, int]] = {}  # entries that were counted

    def pack(tensor: torch.Tensor) -> Any:
        found = saves.pack(tensor)
        if isinstance(found, torch.Tensor):
            return tensor.detach() if _key(tensor) in resident else CountedTensor(tensor, held)
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


def _own_storages(module: torch.nn.Module) -> set[int]:
    """Of parameters and buffers, as they are during a call."""
    return {_key(t) for t in itertools.chain(module.parameters(), module.buffers())}


def _key(tensor: torch.Tensor) -> int:
    return int(local_of(tensor).untyped_storage()._cdata)


# prediction


class LayerSaves:
    """What a layer's forward saved in a trial: storages by number, and their bytes."""

    def __init__(self, saved: dict[int, int], inputs: dict[int, int], outputs: set[int], changed: list[str]) -> None:
        self.saved, self.inputs, self.outputs, self.changed = saved, inputs, outputs, changed
        self.gone: set[int] = set()  # saved, and let go by a backward of inputs only

    def held(self, way: str) -> dict[int, int]:
        """From the end of the layer's forward to its backward."""
        if way == RECOMPUTE:
            return self.inputs
        return {k: n for k, n in self.saved.items() if k in self.outputs} if way == OFFLOAD else self.saved

    def made(self, way: str) -> dict[tuple[str, int], int]:
        """What its backward makes or fetches, and holds besides."""
        if way == RECOMPUTE:
            return {("again", k): n for k, n in self.saved.items() if k not in self.inputs}
        return {("back", k): n for k, n in self.saved.items() if k not in self.outputs} if way == OFFLOAD else {}

    def left(self, way: str, *, over: bool) -> dict[Any, int]:
        """After its part of a backward that computes the gradients of inputs only; `over`: that of the stage is over."""
        saved = {k: n for k, n in self.saved.items() if not over or k not in self.gone}
        if way == KEEP:
            return saved
        same = self.inputs if way == RECOMPUTE else self.outputs  # what is not made or fetched
        word = "again" if way == RECOMPUTE else "back"
        return {k if k in same else (word, k): n for k, n in saved.items()}


class StageBytes:
    """Bytes that one micro-batch has autograd hold on a stage, by the ways of its layers."""

    def __init__(self, layers: Sequence[LayerSaves], ways: Sequence[str]) -> None:
        each = list(zip(layers, ways, strict=True))
        held: list[dict[Any, int]] = [layer.held(way) for layer, way in each]
        made: list[dict[Any, int]] = [layer.made(way) for layer, way in each]
        leaving: list[dict[Any, int]] = [layer.saved if way == OFFLOAD else {} for layer, way in each]
        left = [layer.left(way, over=False) for layer, way in each]
        before = [_union(held[: n + 1]) for n in range(len(layers))]
        self.after = _total(before[-1])
        self.in_forward = max(_total(b | leaving[n]) for n, b in enumerate(before))
        self.in_backward = max(_total(b | made[n]) for n, b in enumerate(before))
        self.in_input = max(_total(b | made[n] | _union(left[n + 1 :])) for n, b in enumerate(before))
        self.for_weight = _total(_union([layer.left(way, over=True) for layer, way in each]))


def _union(sets: Sequence[dict[Any, int]]) -> dict[Any, int]:
    return {key: nbytes for one in sets for key, nbytes in one.items()}


def _total(held: dict[Any, int]) -> int:
    return sum(held.values())


def try_stage(
    module: torch.nn.Module,
    inputs: Any,
    device: torch.device,
    loss: Any = None,
    targets: Any = None,
    *,
    in_two: bool = False,
) -> list[LayerSaves]:
    """One forward of a stage, for what its layers save; `loss`: of the last stage, counted as one more layer. `in_two`: also
    the first part of a backward in two. The random state and buffers are as before."""
    before = [b.detach().clone() for b in module.buffers()]
    counter, alive = HeldBytes(), [inputs]  # what was saved stays here too, so that no other storage gets its number
    found: list[LayerSaves] = []
    steps: list[tuple[torch.nn.Module | None, Any]] = [(layer, layer) for layer in module.children()]
    steps += [(None, lambda out: loss(out, targets))] if loss is not None else []
    given = inputs
    with same_random(device), torch.enable_grad():
        for layer, run in steps:
            resident = set(storages_of((inputs, targets))) | (_own_storages(layer) if layer is not None else set())
            named = dict(layer.named_buffers()) if layer is not None else {}
            values = {name: b.detach().clone() for name, b in named.items()}
            saved: dict[int, int] = {}

            def pack(tensor: torch.Tensor, resident: set[int] = resident, saved: dict[int, int] = saved) -> Any:
                if _key(tensor) in resident:
                    return tensor.detach()
                saved[_key(tensor)] = local_of(tensor).untyped_storage().nbytes()
                alive.append(tensor.detach())
                return CountedTensor(tensor, counter)

            with saved_tensors_hooks(pack, unpack):
                out = run(given)
            sizes = {_key(t): local_of(t).untyped_storage().nbytes() for t in _tensors(given)}
            taken = {k: n for k, n in sizes.items() if k not in resident}
            changed = list(named) if any(not torch.equal(b, values[name]) for name, b in named.items()) else []
            found.append(LayerSaves(saved, taken, set(storages_of(out)), changed))
            alive.append(out.detach() if isinstance(out, torch.Tensor) else out)
            given = out
        if in_two:
            rest = backward_of_inputs(list(_tensors(given)), list(_tensors(inputs)), module)
            for one in found:
                one.gone = {k for k in one.saved if not counter.holds(k)}
            del rest
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in torch.utils._pytree.tree_iter(value) if isinstance(t, torch.Tensor))
