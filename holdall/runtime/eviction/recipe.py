"""A recorded op call that can be repeated: arguments by storage and geometry, random state, results in order."""

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
    """An argument in a storage of the pool."""

    input: int  # index among the op's inputs
    form: Geometry


class Constant(NamedTuple):
    """An argument outside the pool: a parameter, a buffer, the batch."""

    tensor: torch.Tensor
    version: int
    changed: bool  # the op changes it; a repetition uses a copy


class OpRecipe:
    __slots__ = ("flat", "func", "grads", "random", "spec")

    def __init__(self, func: Any, flat: list[Any], spec: Spec, random: RandomState | None) -> None:
        self.func = func
        self.flat = flat  # arguments with tensors replaced by Spot and Constant
        self.spec = spec
        self.random = random
        self.grads = torch.is_grad_enabled()  # some kernels compute more when gradients are on

    def run(self, inputs: Sequence[Storage], instead: dict[int, Any]) -> list[torch.UntypedStorage]:
        """Run the op; returns the storages that it makes, in order. `instead`: bytes to use for an input, by index."""
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
                    f"`{self.func}` cannot be recomputed: its input of shape {list(x.tensor.shape)} was changed in place",
                    hint="do not change parameters or inputs between forward and backward",
                )
            return x.tensor
        return x


def new_storages(out: Any, given: set[int]) -> list[torch.UntypedStorage]:
    """Storages of the results that are not arguments, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for t in tensors_in(out):
        storage = t.untyped_storage()
        if storage._cdata not in given:
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def version_of(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


class RandomState:
    """State of the random generators before an op drew from them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again; restores the generators afterwards."""
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
