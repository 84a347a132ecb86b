"""One micro-batch of a stage, tried: what each of its layers saves, and what it needs for a while besides.

The stage runs forward and backward twice, once making gradients and once adding to them, and its layers forward once without
saving anything, each on what the one before returned; a ledger counts. Gradients, buffers and the random state are as before.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from holdall.pipelines.running.budget.saved import OFFLOAD, RECOMPUTE, CountedTensor, HeldBytes, key_of, own_storages
from holdall.pipelines.running.pieces import handed_on, received
from holdall.pipelines.running.torch_names import backward_of_inputs, backward_of_weights
from holdall.pipelines.running.undone import as_if_not_run
from holdall.runtime.activations.offload import storages_of
from holdall.runtime.activations.recompute import unpack
from holdall.runtime.budget.ledger import Ledger
from holdall.sharded import local_of

Sizes = dict[int, int]  # number of a storage -> its bytes


@dataclass
class Passing:
    """Bytes that a layer needs for a while, besides what is held then."""

    forward: int = 0  # in a forward, from its beginning; what it saves and its output are among them
    again: int = 0  # in a forward of which nothing is saved
    backward: int = 0  # in a backward that adds to gradients; the gradient of its output is among them
    first: int = 0  # in one that makes gradients: these, and those of the layers after it, are among them
    gradient: int = 0  # of its output
    copied: int = 0  # buffers that its forward changes, which a recomputed call copies before
    trained: int = 0  # its parameters that get gradients


@dataclass
class LayerSaves:
    """What a layer's forward saved: storages by number, and their bytes."""

    saved: Sizes
    inputs: Sizes
    outputs: set[int]
    changed: list[str]
    passing: Passing = field(default_factory=Passing)
    gone: set[int] = field(default_factory=set)  # saved, and let go by a backward of inputs only

    def held(self, way: str) -> Sizes:
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
        if way in (RECOMPUTE, OFFLOAD):
            same = self.inputs if way == RECOMPUTE else self.outputs  # what is not made or fetched
            word = "again" if way == RECOMPUTE else "back"
            return {k if k in same else (word, k): n for k, n in saved.items()}
        return saved


@dataclass
class StageTrial:
    """`layers`: the loss last where it is computed. Bytes of the others are of one micro-batch, the gradients' of the stage."""

    layers: list[LayerSaves]
    outputs: Sizes = field(default_factory=dict)  # of the stage, and the loss
    ends: Sizes = field(default_factory=dict)  # those of them that torch holds from one part of a backward to the next
    received: int = 0  # what it gets from another stage
    returned: int = 0  # gradients of what it gets
    answered: int = 0  # gradients of what it hands on
    weights: int = 0  # of the stage's parameters
    gradients: int = 0
    in_input: int = 0  # what a backward of inputs only needs for a while, besides what is held
    captured: int = 0  # what it keeps for the second part, besides what was saved
    first_weight: int = 0  # what the second part needs for a while when it makes gradients
    in_weight: int = 0  # and when it adds to them


def try_stage(
    module: torch.nn.Module,
    inputs: Any,
    device: torch.device,
    loss: Any = None,
    targets: Any = None,
    *,
    in_two: bool = False,
    with_backward: bool = True,
) -> StageTrial:
    """`inputs`: with gradients where a stage before wants them. `loss`: of the last stage, counted as one more layer. `in_two`:
    backwards are in two parts. Without `with_backward` nothing is said of what passes."""
    with as_before(module, device), torch.enable_grad(), _no_collections():
        return _StageTry(module, inputs, loss, targets).run(in_two=in_two, with_backward=with_backward)


@contextmanager
def as_before(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards gradients, of which there are none inside, buffers, attributes and the random state are as before."""
    gradients = [(p, p.grad) for p in module.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        with as_if_not_run([module], device):
            yield
    finally:
        for p, before in gradients:
            p.grad = before


@contextmanager
def _no_collections() -> Iterator[None]:
    """Whatever garbage there is stays until afterwards, so that no count changes by it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _StageTry:
    def __init__(self, module: torch.nn.Module, inputs: Any, loss: Any, targets: Any) -> None:
        self.module, self.inputs, self.is_last = module, inputs, loss is not None
        self.steps: list[Callable[[Any], Any]] = list(module.children())
        if loss is not None:
            self.steps.append(lambda out: loss(out, targets))
        self.resident = set(storages_of((inputs, targets)))
        self.numbers = _Numbers()
        self.ledger = Ledger(seed=[*module.parameters(), *module.buffers(), *_tensors((inputs, targets))])
        self.again: list[int] = []  # by layer: the most that a forward needs that saves nothing

    def run(self, *, in_two: bool, with_backward: bool) -> StageTrial:
        with self.ledger:
            if with_backward:
                self._forget()
                trial = self._whole()
                for layer, other in zip(trial.layers, self._whole().layers, strict=True):
                    layer.passing.backward = other.passing.first
            else:
                run = _Forward(self)
                trial = run.trial
                run.close()
            if in_two:
                for p in self.module.parameters():
                    p.grad = None
                trial.first_weight = self._in_two(trial)
                trial.in_weight = self._in_two(trial) if with_backward else trial.first_weight
        return trial

    @torch.no_grad()
    def _forget(self) -> None:
        given = self.inputs
        for n in range(len(self.steps)):
            before = self._begin()
            given = self.run_step(n, given)
            self.again.append(self.ledger.peak - before)

    def run_step(self, n: int, given: Any) -> Any:
        out = self.steps[n](given if n else received(given))
        return handed_on(out) if n == len(self.steps) - 1 and not self.is_last else out

    def _begin(self) -> int:
        self.ledger.restart()
        return self.ledger.live

    def _whole(self) -> StageTrial:
        """A micro-batch, forward and backward; `first` of every layer is of this one."""
        run = _Forward(self)
        trial = run.trial
        grads = None if self.is_last else [torch.ones_like(t) for t in _trained(run.out)]
        apart = self.ledger.live - _total(run.held)  # what is there besides
        self.ledger.restart()
        if ends := _trained(run.end):
            torch.autograd.backward(ends, grads)
        run.note()
        for n, layer in enumerate(trial.layers):
            there = _union([trial.outputs, *(before.saved for before in trial.layers[: n + 1])])
            layer.passing.first = max(0, run.peaks.get(n, 0) - apart - _total(there))
        trial.gradients = _total(self.numbers.sizes([p.grad for p in self.module.parameters()]))
        self._forget_returned(trial)
        run.close()
        return trial

    def _forget_returned(self, trial: StageTrial) -> None:
        given = list(_tensors(self.inputs))
        trial.returned = _total(self.numbers.sizes([t.grad for t in given]))
        for t in given:
            t.grad = None

    def _in_two(self, trial: StageTrial) -> int:
        """A micro-batch whose backward is in two parts; returns what the second needs for a while."""
        counter = HeldBytes()
        run = _Forward(self, counter)
        grads = None if self.is_last else [torch.ones_like(t) for t in _trained(run.out)]
        apart = self._begin() - _total(run.held)
        rest = backward_of_inputs(_trained(run.end), _trained(self.inputs), self.module, grads)
        trial.in_input = max(0, self.ledger.peak - apart - _total(run.held))
        if self.is_last:
            run.out = None
        for layer, tried in zip(trial.layers, run.trial.layers, strict=True):
            gone = [
                n
                for n, (before, now) in enumerate(zip(layer.saved, tried.saved, strict=True))
                if not counter.holds(run.keys[now])
            ]
            layer.gone = {list(layer.saved)[n] for n in gone}
        there = _union([trial.ends, *(layer.left("", over=True) for layer in trial.layers)])
        before = self._begin()
        trial.captured = max(0, before - apart - _total(there) - trial.returned)
        backward_of_weights(self.module, rest)
        most = self.ledger.peak - before
        self._forget_returned(trial)
        run.close()
        return most


class _Forward:
    """A stage forward, layer by layer, with a mark where the backward of each begins."""

    def __init__(self, of: _StageTry, counter: HeldBytes | None = None) -> None:
        self._of, self._ledger = of, of.ledger
        self._counter = HeldBytes() if counter is None else counter
        self.peaks: dict[int, int] = {}  # layer -> the most bytes in its backward
        self._hooks: list[Any] = []
        self.keys: Sizes = {}  # number of a saved storage -> torch's
        self.trial = trial = StageTrial([])
        trial.received = _total(of.numbers.sizes(_tensors(of.inputs)))
        trial.weights = sum(local_of(p).nbytes for p in of.module.parameters())
        self.out = of.inputs  # of the stage
        given = of.inputs
        for n, step in enumerate(of.steps):
            self._at = n
            given = self._layer(n, step, given)
            if step is not of.steps[-1] or not of.is_last:
                self.out = given
        self.end = given  # the loss, where it is computed
        trial.outputs = of.numbers.sizes(_tensors([self.out, self.end]))
        trial.ends = of.numbers.sizes(_tensors(self.end))
        trial.answered = sum(t.nbytes for t in _trained(self.out))
        self.held = _union([trial.outputs, *(layer.saved for layer in trial.layers)])

    def _layer(self, n: int, step: Any, given: Any) -> Any:
        is_layer = isinstance(step, torch.nn.Module)
        resident = self._of.resident | (own_storages(step) if is_layer else set())
        named = dict(step.named_buffers()) if is_layer else {}
        values = {name: b.detach().clone() for name, b in named.items()}
        saved: Sizes = {}

        def pack(tensor: torch.Tensor) -> Any:
            if key_of(tensor) in resident:
                return tensor.detach()
            for number, size in self._of.numbers.sizes([tensor]).items():
                saved[number], self.keys[number] = size, key_of(tensor)
            return CountedTensor(tensor, self._counter)

        inputs = self._of.numbers.sizes(t for t in _tensors(given) if key_of(t) not in resident)
        before = self._of._begin()
        with saved_tensors_hooks(pack, unpack):
            out = self._of.run_step(n, given)
        passing = Passing(forward=self._ledger.peak - before, again=self._of.again[n] if self._of.again else 0)
        changed = list(named) if any(not torch.equal(b, values[name]) for name, b in named.items()) else []
        passing.copied = sum(named[name].nbytes for name in changed)
        passing.trained = sum(local_of(p).nbytes for p in step.parameters() if p.requires_grad) if is_layer else 0
        passing.gradient = sum(t.nbytes for t in _trained(out))
        outputs = set(self._of.numbers.sizes(_tensors(out)))
        self.trial.layers.append(LayerSaves(saved, inputs, outputs, changed, passing))
        self._hooks += [t.register_hook(partial(self._begun, n)) for t in _trained(out)]
        return out

    def _begun(self, n: int, _: torch.Tensor) -> None:
        """The gradient of a layer's output is there."""
        if n < self._at:
            self.note()
            self._at = n
            self._ledger.restart()

    def note(self) -> None:
        self.peaks[self._at] = self._ledger.peak

    def close(self) -> None:
        """Nothing of it stays: hooks and outputs refer to each other."""
        for hook in self._hooks:
            hook.remove()
        self.out = self.end = None


class _Numbers:
    """Numbers storages for as long as they live: torch gives a dead one's number to another."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def sizes(self, tensors: Iterable[torch.Tensor | None]) -> Sizes:
        """Numbers and bytes of their storages, each once."""
        storages = (local_of(t).untyped_storage() for t in tensors if t is not None)
        return {self._of(storage): storage.nbytes() for storage in storages}

    def _of(self, storage: torch.UntypedStorage) -> int:
        key = int(storage._cdata)
        number, alive = self._known.get(key, (-1, None))
        if alive is None or alive() is None:
            number = next(self._next)
            self._known[key] = number, weakref.ref(storage)
        return number


def _union(sets: Sequence[dict[Any, int]]) -> dict[Any, int]:
    return {key: nbytes for one in sets for key, nbytes in one.items()}


def _total(held: dict[Any, int]) -> int:
    return sum(held.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (t for t in tree_iter(value) if isinstance(t, torch.Tensor))


def _trained(value: Any) -> list[torch.Tensor]:
    return [t for t in _tensors(value) if t.requires_grad]
