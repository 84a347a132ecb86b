"""Updates via the device: masters and states live on the host, are copied in, updated and copied back.

A unit's masters and states are one piece of pinned host memory, its chunk, so one copy moves them all. On the device they use a
slot, which the next unit takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdall.runtime.states.packing import Layout, like
from holdall.runtime.states.unit import DEVICE, Member, PlacedUnit
from holdall.runtime.states.updating.in_stretches import InStretches
from holdall.runtime.states.updating.updater import Order, Updater
from holdall.tiers import Ticket, let_wait
from holdall.tiers._buffers import copy_tensor
from holdall.tiers._chaos import current
from holdall.tiers._keepers import Keepers
from holdall.types.layout import update_slot_bytes, widened_bytes


@dataclass(slots=True)
class Chunk:
    """Masters and states of a unit in one piece of pinned host memory."""

    ticket: Ticket
    layout: Layout
    keys: list[tuple[int, str]]  # after the masters: (member, name of the state)

    def span(self, lane: Keepers) -> range:
        """Its addresses."""
        begin = lane.memory(self.ticket).data_ptr()
        return range(begin, begin + self.layout.nbytes)


class Slot:
    """Device memory that units use one after the other."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free: Any = None  # event after which it may be overwritten


class UpdateViaDevice:
    """Updates units via the device."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._chunks: dict[str, Chunk] = {}
        self._slots: list[Slot] = []
        self._sent: list[Ticket] = []  # copies out of the slots
        self._turn = 0
        self._stream = torch.cuda.Stream(updater.device) if updater.device.type == "cuda" else None

    @property
    def _lane(self) -> Keepers:
        assert self._updater.lane is not None
        return self._updater.lane

    def room(self, nbytes: int, slots: int) -> None:
        """Allocate the slots."""
        if not self._slots:
            self._slots = [Slot(nbytes, self._updater.device) for _ in range(slots)]
            self._turn = 0
            chaos = current()
            if chaos is not None and self._stream is None:  # on a GPU, copies into a slot may begin before this
                chaos.poison(*(slot.memory for slot in self._slots))

    def leave_room(self) -> None:
        """Free the slots; the current stream waits until they are unused."""
        for ticket in self._sent:
            self._lane.wait(ticket)
        self._sent, self._slots = [], []

    def through_bytes(self, unit: PlacedUnit, grads: Layout) -> int:
        """Bytes that a unit needs in a slot: masters, states, gradient, new weights, and space to widen the gradient."""
        chunk = self._chunks[unit.name]
        return update_slot_bytes(
            states=chunk.layout.nbytes,  # masters are in the same chunk
            masters=0,
            grads=grads.nbytes,
            staged=unit.layout.nbytes if unit.is_streamed and unit.is_narrow else 0,
            workspace=widened_bytes(sum(m.master.numel() for m in unit.trained)) if unit.is_narrow else 0,
        )

    def adopt(self, unit: PlacedUnit) -> None:
        """Move a unit's masters and states into one chunk; into a new one if a step or a checkpoint has changed the set of
        states.
        """
        states = self._updater.states(unit.trained)
        keys = [
            (n, key)
            for n, s in enumerate(states)
            for key, v in s.items()
            if isinstance(v, torch.Tensor) and v.numel() and self._updater.follows(unit.trained[n], key, v)
        ]
        before = self._chunks.get(unit.name)
        outside = {(n, key) for n, key in keys if not self._is_in(before, states[n][key])}
        if before is not None and before.keys == keys and not outside:
            return
        layout = Layout.of([like(m.master) for m in unit.trained] + [like(states[n][key]) for n, key in keys])
        if before is not None:
            self._lane.arrived(before.ticket)
        ticket = self._lane.reserve(layout.nbytes)
        views = layout.views(self._lane.memory(ticket))
        with self._updater.quiet():
            for m, view in zip(unit.trained, views, strict=False):
                copy_tensor(view, m.master.data)
                m.master.data = view
            for (n, key), view in zip(keys, views[len(unit.trained) :], strict=True):
                copy_tensor(view, states[n][key])
                if (n, key) in outside:
                    self._updater.away.discard(states[n][key].untyped_storage()._cdata)  # its address will be reused
                    self._updater.outside -= view.nbytes
                states[n][key] = view
        if before is not None:
            self._lane.free(before.ticket)
        elif unit.masters is not None and len(unit.trained) == len(unit.members):
            self._lane.free(unit.masters)  # otherwise frozen masters stay there until the store is closed
        if not unit.is_narrow:  # working weights are fetched from the chunk, if it begins with all masters
            unit.source = ticket if len(unit.trained) == len(unit.members) else None
        unit.masters = ticket
        self._updater.keep(unit.trained, states, away=True)
        self._chunks[unit.name] = Chunk(ticket, layout, keys)

    def _is_in(self, chunk: Chunk | None, state: torch.Tensor) -> bool:
        return chunk is not None and state.data_ptr() in chunk.span(self._lane)

    def refill_chunks(self, units: Sequence[PlacedUnit], stretched: InStretches | None = None) -> None:
        """After the optimizer loaded states: copy those with the same layout into the chunks."""
        outside = 0
        for unit in units:
            states = self._updater.states(unit.trained)
            chunk = self._chunks.get(unit.name)
            if chunk is not None:
                views = chunk.layout.views(self._lane.memory(chunk.ticket))[len(unit.trained) :]
                for (n, key), view in zip(chunk.keys, views, strict=True):
                    if key in states[n] and _are_alike(states[n][key], view):
                        copy_tensor(view, states[n][key])
                        states[n][key] = view
            if unit.is_away and stretched is not None:
                stretched.refill(unit)
                states = self._updater.states(unit.trained)
            if unit.update != DEVICE:
                kept = [v for s in states for v in s.values() if isinstance(v, torch.Tensor) and not self._is_in(chunk, v)]
                kept = [v for v in kept if not (unit.is_away and stretched is not None and stretched.holds(unit, v))]
                outside += sum(v.nbytes for v in kept)
        self._updater.outside = outside

    def update(self, unit: PlacedUnit, order: Order, ticket: Ticket, layout: Layout) -> Any:
        """Make one update via the device. `ticket`, `layout`: the gradient on the host. Returns as `on_host`."""
        chunk = self._chunks[unit.name]
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        states_at = slot.memory[: chunk.layout.nbytes]
        grads_at = slot.memory[chunk.layout.nbytes : chunk.layout.nbytes + layout.nbytes]
        rest = slot.memory[chunk.layout.nbytes + layout.nbytes :]
        after = slot.free if slot.free is not None else order.after
        self._lane.pull(chunk.ticket, states_at, after=after)
        here = self._lane.pull(ticket, grads_at, after=after)
        is_staged = unit.is_streamed and unit.is_narrow  # otherwise the masters themselves are fetched
        staged = rest[: unit.layout.nbytes] if is_staged else rest[:0]
        if is_staged and len(unit.trained) < len(unit.members):  # frozen members are copied back unchanged
            assert unit.source is not None
            here = self._lane.pull(unit.source, staged, after=after)
        if self._stream is None and here is not None:
            let_wait(here, self._updater.device)
        stream = torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
        with stream:
            if self._stream is not None:
                self._stream.wait_event(here)
                self._stream.wait_event(order.after)
            views = chunk.layout.views(states_at)
            own = self._updater.states(unit.trained)
            states = [dict(s) for s in own]
            for (n, key), view in zip(chunk.keys, views[len(unit.trained) :], strict=True):
                states[n][key] = view
            grads = layout.views(grads_at)
            weights = unit.weights() if not unit.is_streamed else []
            if is_staged:
                weights = [v for v, m in zip(unit.layout.views(staged), unit.members, strict=True) if m.trained]
                for n in set(range(len(weights))).difference(order.which):  # no gradient: unchanged
                    weights[n].copy_(views[n])
            self._updater.part(unit).update(
                [views[n] for n in order.which],
                [grads[n] for n in order.which],
                [states[n] for n in order.which],
                order.groups,
                order.which,
                scale=order.scale,
                narrow=[weights[n] for n in order.which] if weights else None,
                sliced=True,
                scratch=rest[staged.numel() :].view(torch.float32) if unit.is_narrow else None,
            )
            self._take_back(unit, chunk, views[len(unit.trained) :], own, states)
            self._updater.keep(unit.trained, own)  # store newly created states
            ready = self._stream.record_event() if self._stream is not None else None
        self._lane.push(chunk.ticket, states_at, after=ready)
        self._sent.append(chunk.ticket)
        slot.free = chunk.ticket.out
        if is_staged:
            assert unit.source is not None
            self._lane.push(unit.source, staged, after=ready)
            self._sent.append(unit.source)
            slot.free = unit.source.out
        return ready

    def _take_back(
        self,
        unit: PlacedUnit,
        chunk: Chunk,
        views: Sequence[torch.Tensor],
        own: Sequence[dict[str, Any]],
        states: Sequence[dict[str, Any]],
    ) -> None:
        """Keep tensors that the update put into the states instead of those of the chunk."""
        there = dict(zip(chunk.keys, views, strict=True))
        for n, (mine, new) in enumerate(zip(own, states, strict=True)):
            for key, value in new.items():
                view = there.get((n, key))
                if view is not None and value is view:
                    continue
                if view is not None and _are_alike(value, view):
                    view.copy_(value)
                elif isinstance(value, torch.Tensor) and value.numel() and value is not mine.get(key):
                    self._put(unit.trained[n], mine, key, value)
                else:
                    mine[key] = value

    def _put(self, member: Member, state: dict[str, Any], key: str, value: torch.Tensor) -> None:
        """Store a tensor that an update created as a state, in ordinary host memory; counters stay where they are."""
        follows = self._updater.follows(member, key, value)
        before = state.get(key)
        with self._updater.quiet():
            state[key] = value.to(member.master.device if follows else value.device, copy=True)
        self._updater.away.add(state[key].untyped_storage()._cdata)
        self._updater.outside += value.nbytes
        if not follows and isinstance(before, torch.Tensor):
            self._updater.away.discard(before.untyped_storage()._cdata)
            self._updater.outside -= before.nbytes


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)
