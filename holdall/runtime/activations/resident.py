"""Which tensors that a block call saves stay on the device whatever is planned: those of parameters and buffers.

Where ranks have shards of a model, a module computes with parameters that torch's engine gathers, frees and fills again. Traces
of shards do not record autograd's references to them, so they have no number among the call's saved tensors either. Where a
model was traced whole and then sharded by hand, they have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

import torch

from holdall.sharded import is_shard

_Places = tuple[tuple[dict[str, torch.nn.Parameter | None], str], ...]  # tables of modules, and names in them


class Resident:
    """`storages`: of parameters and buffers, as they are between steps. `in_shards`: some are gathered while a module runs.
    `as_whole`: but the trace is of the whole model."""

    def __init__(self, storages: Iterable[int], *, in_shards: bool = False, as_whole: bool = False) -> None:
        self._storages = frozenset(storages)
        self._in_shards, self._as_whole = in_shards, as_whole
        self._places: WeakKeyDictionary[torch.nn.Module, _Places] = WeakKeyDictionary()

    def call(self, module: torch.nn.Module) -> CallSaves:
        """For one call of a module."""
        return CallSaves(self._storages, self._places_in(module) if self._in_shards else (), as_whole=self._as_whole)

    def _places_in(self, module: torch.nn.Module) -> _Places:
        """Where its parameters are found; the engine puts others there."""
        found = self._places.get(module)
        if found is None:
            found = tuple((m._parameters, name) for m in module.modules() for name in m._parameters)
            self._places[module] = found
        return found


class CallSaves:
    """The tensors that autograd saves in one call."""

    __slots__ = ("_as_whole", "_count", "_places", "_storages")

    def __init__(self, storages: Collection[int], places: _Places = (), *, as_whole: bool = False) -> None:
        self._storages = storages
        self._places = places
        self._as_whole = as_whole
        self._count = 0

    def stays(self, key: int) -> bool:
        """Is this the storage of a parameter or a buffer?"""
        return key in self._storages or self._is_gathered(key)

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of the next saved tensor, as a trace counts them; None: it is not counted."""
        if not self._as_whole and (is_shard(tensor) or self._is_engines(tensor)):
            return None
        number, self._count = self._count, self._count + 1
        return number

    def _is_engines(self, tensor: torch.Tensor) -> bool:
        if not self._places:
            return False
        key = tensor.untyped_storage()._cdata
        return key not in self._storages and self._is_gathered(key)

    def _is_gathered(self, key: int) -> bool:
        for table, name in self._places:
            parameter = table.get(name)
            if parameter is not None and not is_shard(parameter) and parameter.untyped_storage()._cdata == key:
                return True
        return False
