"""An op as it was called, so that it can be called again: arguments by storage and form, random state, results in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from holdall.errors import Unsupported
from holdall.runtime.eviction.arguments import Spec, tensors_in, unflatten
from holdall.runtime.eviction.handle import Geometry, over
from holdall.runtime.eviction.storages import Storage


class Spot(NamedTuple):
    """An argument whose bytes are a storage's."""

    input: int  # its number among the inputs of the op
    form: Geometry


class Constant(NamedTuple):
    """An argument that is none of the pool's: a parameter, a buffer, the batch."""

    tensor: torch.Tensor
    version: int
    changed: bool  # the op changes it; a copy takes its place when it runs again


class Recipe:
    __slots__ = ("flat", "func", "grads", "random", "spec")

    def __init__(self, func: Any, flat: list[Any], spec: Spec, random: RandomState | None) -> None:
        self.func = func
        self.flat = flat  # Spot and Constant in the place of tensors
        self.spec = spec
        self.random = random
        self.grads = torch.is_grad_enabled()  # some kernels look: they make more for a backward

    def run(self, inputs: Sequence[Storage], instead: dict[int, Any]) -> list[torch.UntypedStorage]:
        """The storages that it makes, in order. `instead`: bytes to use for an input, by its index."""
        given: set[int] = set()
        flat = [self._argument(x, inputs, instead) for x in self.flat]
        for t in flat:
            if isinstance(t, torch.Tensor):
                given.add(t.untyped_storage()._cdata)
        args, kwargs = unflatten(flat, self.spec)
        drawing = self.random.again() if self.random is not None else nullcontext()
        with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(self.grads), drawing:
            out = self.func(*args, **kwargs)
        return new_storages(out, given)

    def _argument(self, x: Any, inputs: Sequence[Storage], instead: dict[int, Any]) -> Any:
        if isinstance(x, Spot):
            return over(instead.get(x.input, inputs[x.input].bytes), x.form)
        if isinstance(x, Constant):
            if x.changed:
                return x.tensor.detach().clone()
            if version_of(x.tensor) != x.version:
                raise Unsupported(
                    f"`{self.func}` cannot be run again: a tensor of shape {list(x.tensor.shape)} that it read was changed",
                    hint="do not change parameters or inputs between forward and backward",
                )
            return x.tensor
        return x


def new_storages(out: Any, given: set[int]) -> list[torch.UntypedStorage]:
    """Storages among the results that were not among the arguments, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for t in tensors_in(out):
        storage = t.untyped_storage()
        if storage._cdata not in given:
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def version_of(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


class RandomState:
    """Of the generators before an op drew from them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers; the generators are then as they were."""
        now = RandomState(self._device)
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)
