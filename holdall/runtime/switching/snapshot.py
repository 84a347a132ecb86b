"""What a forward changes besides making tensors: random numbers and buffers. Taken before it, put back to run it again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase

Key = tuple[int, str]  # (its module's place in the model, its name)
Quiet = Callable[[], AbstractContextManager[object]]  # ops inside are not counted against the budget


class RandomNumbers:
    """Every generator that a model may draw from, as it is now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if self._device is not None else None
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def put_back(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None and self._device is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Buffers:
    """The buffers of a model that its forward changes, found by watching it; copies lie in the host's memory.

    Norms write their running statistics in a kernel that does not count it as a change: they are always among them, and after
    the first forward values are compared.
    """

    def __init__(self, model: torch.nn.Module, quiet: Quiet) -> None:
        self._model = model
        self._quiet = quiet
        self._changing: set[Key] | None = None  # None: not watched yet
        self._owners = self._find()  # looking for them takes longer than copying them

    def _find(self) -> list[tuple[int, torch.nn.Module]]:
        return [(place, module) for place, module in enumerate(self._model.modules()) if module._buffers]

    @property
    def is_stale(self) -> bool:
        """Whether other modules have buffers now than when they were found."""
        return [id(m) for _, m in self._find()] != [id(m) for _, m in self._owners]

    def take(self) -> Values:
        """As they are now. At first all of them; later those that were ever seen to change."""
        kept = []
        for place, module in self._owners:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    always = self._changing is None or isinstance(module, _NormBase)
                    copied = always or (place, name) in (self._changing or ())
                    copy = self._copy(buffer) if copied else None
                    kept.append(_Kept((place, name), module._buffers, buffer, buffer._version, copy))
        return Values(kept, self._quiet)

    def watch(self, before: Values) -> None:
        """After a forward: which of them did it change?"""
        first = self._changing is None
        self._changing = (self._changing or set()) | before.changed(by_value=first)

    def _copy(self, buffer: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), self._quiet():
            copy = torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda)
            return copy.copy_(buffer, non_blocking=True)  # put back on the same stream, so that nothing waits


class _Kept(NamedTuple):
    key: Key
    slots: dict[str, Any]
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def was_replaced(self) -> bool:
        return self.slots.get(self.key[1]) is not self.buffer

    @property
    def was_written(self) -> bool:
        return self.buffer._version != self.version


class Values:
    """Buffers at one moment."""

    def __init__(self, kept: list[_Kept], quiet: Quiet) -> None:
        self._kept = kept
        self._quiet = quiet

    def changed(self, *, by_value: bool) -> set[Key]:
        """Those that are not what they were."""
        found = {k.key for k in self._kept if k.was_replaced or k.was_written}
        if by_value:
            with self._quiet():
                found |= {k.key for k in self._kept if k.copy is not None and not torch.equal(k.copy, k.buffer.cpu())}
        return found

    def lost(self) -> list[str]:
        """Names of those that were written to and of which there is no copy."""
        return [k.key[1] for k in self._kept if k.copy is None and k.was_written]

    def put_back(self) -> None:
        with torch.no_grad(), self._quiet():
            for k in self._kept:
                k.slots[k.key[1]] = k.buffer
                if k.copy is not None:
                    with _unsafe_preserve_version_counter(k.buffer):  # a graph of another forward may know it
                        k.buffer.copy_(k.copy, non_blocking=True)
