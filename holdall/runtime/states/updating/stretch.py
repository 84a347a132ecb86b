"""The update of one unit, a stretch of its masters and states at a time (`in_stretches.py` reads and writes them)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdall.errors import HoldallError
from holdall.runtime.states.packing import Layout
from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.updating.updater import Order, Updater
from holdall.tiers import Ticket
from holdall.tiers._buffers import copy_tensor

MASTERS = ""  # their section


@dataclass(slots=True)
class Sections:
    """Where a unit's masters and states lie: a flat buffer for each, all with the same layout."""

    layout: Layout
    tickets: dict[str, Ticket]  # of the masters, then of each kind of state
    views: dict[str, list[torch.Tensor]]  # as memory, by trained member

    @property
    def states(self) -> list[str]:
        return [key for key in self.tickets if key != MASTERS]


@dataclass(slots=True)
class StretchRoom:
    """Host memory for one stretch."""

    ticket: Ticket
    memory: torch.Tensor
    busy: list[Any] = field(default_factory=list)  # copies out of it


@dataclass(slots=True)
class ComingStretch:
    """On its way into its room."""

    unit: PlacedUnit
    begin: int
    end: int
    room: StretchRoom
    coming: list[Any]


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a trained member that lies in a stretch."""

    member: int
    at: int  # bytes from the beginning of the stretch
    nbytes: int
    first: int  # element

    def of(self, tensor: torch.Tensor, itemsize: int) -> torch.Tensor:
        """The same elements of a dense tensor of the member's pattern, in the order of memory."""
        return tensor.as_strided((tensor.numel(),), (1,))[self.first : self.first + self.nbytes // itemsize]


class StretchedUpdate:
    """One update of a unit. Counters advance once, whatever the number of stretches that a member lies in."""

    def __init__(
        self, unit: PlacedUnit, order: Order, grads: Sequence[torch.Tensor], sections: Sections, updater: Updater
    ) -> None:
        self._unit = unit
        self._order = order
        self._sections = sections
        self._updater = updater
        assert updater.lane is not None
        self._states = dict(zip(order.which, updater.states([unit.trained[n] for n in order.which]), strict=True))
        self._grads = dict(zip(order.which, grads, strict=True))
        self._narrow = unit.host_weights(updater.lane)
        self._scale = order.scale.cpu() if order.scale is not None else None
        self._after: dict[int, dict[str, Any]] = {}  # member -> its counters after the update
        members = [unit.trained[n] for n in order.which]
        self._is_fast = all(self._states.values()) and updater.is_plain_adam(order.groups, members)

    def make(self, stretch: ComingStretch, size: int) -> None:
        """Update what lies in this stretch."""
        found = [s for s in _slices(self._sections.layout, stretch.begin, stretch.end) if s.member in self._states]
        if not found:
            return
        parts = {key: stretch.room.memory[n * size :] for n, key in enumerate(self._sections.tickets)}
        values = [self._in(parts[MASTERS], s) for s in found]
        states = [self._state(parts, s) for s in found]
        grads = [s.of(self._grads[s.member], self._itemsize(s)) for s in found]
        narrow = [s.of(self._narrow[s.member], self._itemsize(s)) for s in found] if self._narrow else None
        which = tuple(s.member for s in found)
        order = Order(self._order.groups, which, self._order.scale, self._order.after)
        if self._is_fast:
            self._updater.one_pass(self._unit, order, values, grads, states, self._scale, narrow)
        else:
            self._updater.part(self._unit).update(values, grads, states, order.groups, which, scale=self._scale, narrow=narrow)
        for s, state in zip(found, states, strict=True):
            self._keep(parts, s, state)

    def _itemsize(self, s: Slice) -> int:
        return self._unit.trained[s.member].master.element_size()

    def _in(self, memory: torch.Tensor, s: Slice) -> torch.Tensor:
        return memory[s.at : s.at + s.nbytes].view(self._unit.trained[s.member].master.dtype)

    def _state(self, parts: dict[str, torch.Tensor], s: Slice) -> dict[str, Any]:
        """The member's state for this slice; empty if the update is to make it."""
        own = self._states[s.member]
        found: dict[str, Any] = {}
        for key, value in own.items():
            if key in parts:
                found[key] = self._in(parts[key], s)
            else:
                found[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return found

    def _keep(self, parts: dict[str, torch.Tensor], s: Slice, state: dict[str, Any]) -> None:
        for key in self._sections.states:
            value, place = state.pop(key, None), self._in(parts[key], s)
            if not isinstance(value, torch.Tensor) or value.shape != place.shape:
                raise HoldallError(
                    f"the update of `{self._unit.name}` made no state `{key}` of its parameter's shape",
                    hint="plan without this tier for states: leave `nvme` out of the budget",
                )
            if value.data_ptr() != place.data_ptr():
                place.copy_(value)
        self._after[s.member] = state

    def end(self) -> list[tuple[int, str]]:
        """Every stretch is updated: advance the counters. Returns (member, key) of new states, which lie in the sections."""
        made = []
        for n, new in self._after.items():
            master = self._unit.trained[n].master
            own = self._states[n]
            for key, value in new.items():
                before = own.get(key)
                if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor) and before.shape == value.shape:
                    before.copy_(value)
                    continue
                if isinstance(value, torch.Tensor):
                    self._updater.outside += value.nbytes
                    self._updater.away.add(value.untyped_storage()._cdata)
                own[key] = value
            made += [(n, key) for key in self._sections.states if key not in own]
            if not self._updater.optimizer.state.get(master):
                self._updater.optimizer.state[master] = own
        copied = set(range(len(self._unit.trained))).difference(self._after)
        if self._narrow and self._unit.returns_in_buffer:  # otherwise the buffer lacks weights of members without a gradient
            for n in copied:
                copy_tensor(self._narrow[n], self._unit.trained[n].master.data)
        return made


def _slices(layout: Layout, begin: int, end: int) -> Iterator[Slice]:
    """The parts of a layout's tensors between two offsets."""
    for n, (offset, (shape, _, dtype)) in enumerate(layout.places):
        size = dtype.itemsize * torch.Size(shape).numel()
        first, last = max(begin, offset), min(end, offset + size)
        if first < last:
            yield Slice(n, first - begin, last - first, (first - offset) // dtype.itemsize)
