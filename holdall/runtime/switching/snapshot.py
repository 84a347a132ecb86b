"""Saves and restores the side effects of a forward: random numbers and buffers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase

Key = tuple[int, str]  # (index of its module, its name)
Quiet = Callable[[], AbstractContextManager[object]]  # a context whose ops are not counted against the budget


class RandomNumbers:
    """The state of every generator that a model may draw from."""

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


class BufferSnapshots:
    """The buffers that a model's forward changes, found by watching it; copies are in host memory.

    Norms write their running statistics in a kernel that changes no version: they are always included, and after the first
    forward values are compared.
    """

    def __init__(self, model: torch.nn.Module, quiet: Quiet) -> None:
        self._model = model
        self._quiet = quiet
        self._changing: set[Key] | None = None  # None: not watched yet
        self._owners = self._find()  # cached: finding them takes longer than copying them

    def _find(self) -> list[tuple[int, torch.nn.Module]]:
        return [(place, module) for place, module in enumerate(self._model.modules()) if module._buffers]

    @property
    def is_stale(self) -> bool:
        """Have modules gained or lost buffers since?"""
        return [id(m) for _, m in self._find()] != [id(m) for _, m in self._owners]

    def take(self) -> Values:
        """Copies of the buffers now: all of them at first, later only those that have ever changed."""
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
        """After a forward: find the buffers that it changed."""
        first = self._changing is None
        self._changing = (self._changing or set()) | before.changed(by_value=first)

    def _copy(self, buffer: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), self._quiet():
            copy = torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda)
            return copy.copy_(buffer, non_blocking=True)  # restored on the same stream, so nothing waits


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
        """Buffers that have changed since."""
        found = {k.key for k in self._kept if k.was_replaced or k.was_written}
        if by_value:
            with self._quiet():
                found |= {k.key for k in self._kept if k.copy is not None and not torch.equal(k.copy, k.buffer.cpu())}
        return found

    def lost(self) -> list[str]:
        """Names of buffers that were changed and have no copy."""
        return [k.key[1] for k in self._kept if k.copy is None and k.was_written]

    def put_back(self) -> None:
        with torch.no_grad(), self._quiet():
            for k in self._kept:
                k.slots[k.key[1]] = k.buffer
                if k.copy is not None:
                    with _unsafe_preserve_version_counter(k.buffer):  # a graph of another forward may have saved it
                        k.buffer.copy_(k.copy, non_blocking=True)
