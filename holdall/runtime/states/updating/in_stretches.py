"""Host updates of units whose masters and states lie in a farther tier, such as a disk: a stretch of them at a time.

    read    |0|1|2|3|              a stretch is a part of the masters and the same part of every state
    update    |0|1|2|3|            by the host's processors, in one of a few buffers in host memory
    write       |0|1|2|3|

With three buffers all go on side by side; with one, each waits for the other. The reads of the next unit begin while this one
is updated, since the order of units is known (`expect`). Only elementwise rules can be split, and give the same bits: stretches
begin at multiples of a page, where kernels would begin a vector, too.

Between updates, masters and states are memory to the loop: each section is also mapped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from holdall.errors import DiskError, Unsupported
from holdall.runtime.states.host_room import HostRoom
from holdall.runtime.states.torn import check_whole, torn
from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.updating.stretch import MASTERS, ComingStretch, Sections, StretchedUpdate, StretchRoom
from holdall.runtime.states.updating.updater import Order, Updater
from holdall.tiers import Ticket
from holdall.tiers._buffers import copy_tensor
from holdall.tiers._keepers import Keepers
from holdall.types.layout import stretch_bytes, stretches
from holdall.updates.parts import snapshot


class Saving:
    """The copies of an update that go on after it; as a future."""

    def __init__(self, unit: PlacedUnit, lane: Keepers, tickets: Iterable[Ticket], update: Future[Any] | None) -> None:
        self._unit = unit
        self._lane = lane
        self._tickets = list(tickets)
        self._update = update

    def done(self) -> bool:
        outs = [ticket.out for ticket in self._tickets]
        return (self._update is None or self._update.done()) and all(out is None or out.query() for out in outs)

    def result(self) -> None:
        if self._update is not None:
            self._update.result()
        try:
            for ticket in self._tickets:
                self._lane.arrived(ticket)
        except DiskError as error:
            self._unit.is_torn = True
            raise torn(self._unit, error) from error


class InStretches:
    """`stretch`: bytes of each section at a time. `buffers`: stretches in host memory at once."""

    def __init__(self, updater: Updater, *, stretch: int, buffers: int) -> None:
        self._updater = updater
        self._stretch = stretch
        self._buffers = buffers
        self._away: list[PlacedUnit] = []
        self._sections: dict[str, Sections] = {}
        self._rooms: list[StretchRoom] = []
        self._size = 0  # of a section's part of a room
        self._turn = 0
        self._queue: deque[tuple[PlacedUnit, int, int]] = deque()  # to be read, in this order
        self._coming: deque[ComingStretch] = deque()  # being read
        self._before: dict[str, list[Any]] = {}  # unit -> copies of its last update, which reads wait for
        self._lock = threading.Lock()

    @property
    def _lane(self) -> Keepers:
        assert self._updater.lane is not None
        return self._updater.lane

    # setting up and taking down

    def far_bytes(self, units: Sequence[PlacedUnit]) -> dict[str, int]:
        """Bytes that it will ask of each tier, besides the masters."""
        away = [unit for unit in units if unit.is_away]
        asked: dict[str, int] = {}
        most = 0
        for unit in away:
            keys = self._keys(unit)
            most = max(most, 1 + len(keys))
            asked[unit.placement.states] = asked.get(unit.placement.states, 0) + len(keys) * unit.wide.nbytes
        if away:
            asked[""] = self._buffers * most * stretch_bytes((u.wide.nbytes for u in away), self._stretch)
        return asked

    def adopt(self, units: Sequence[PlacedUnit]) -> None:
        """Take room for the states of these units, with those that there are, and for stretches."""
        away = [unit for unit in units if unit.is_away]
        for unit in away:
            assert unit.far_masters is not None
            tier = unit.placement.states
            tickets = {MASTERS: unit.far_masters} | {
                k: self._lane.reserve(unit.wide.nbytes, tier=tier) for k in self._keys(unit)
            }
            views = {key: unit.wide.views(self._lane.memory(ticket)) for key, ticket in tickets.items()}
            self._sections[unit.name] = Sections(unit.wide, tickets, views)
            self._away.append(unit)
            self.refill(unit)
        if away and not self._rooms:
            self._size = stretch_bytes((u.wide.nbytes for u in away), self._stretch)
            most = max(len(s.tickets) for s in self._sections.values())
            for _ in range(self._buffers):
                ticket = self._lane.reserve(most * self._size)
                self._rooms.append(StretchRoom(ticket, self._lane.memory(ticket)))

    def _keys(self, unit: PlacedUnit) -> list[str]:
        """The states of its members that have the members' shape."""
        part = self._updater.part_of(unit)
        if not part.is_elementwise:
            raise Unsupported(
                f"the states of `{unit.name}` cannot be in `{unit.placement.states}`: "
                f"{type(self._updater.optimizer).__name__} does not update each element separately",
                hint="use an elementwise optimizer such as AdamW, or plan with another tier for states",
            )
        found: dict[tuple[str, ...], int] = {}
        groups = snapshot(self._updater.optimizer)
        with self._updater.quiet(), torch.no_grad():
            for n, (member, state) in enumerate(zip(unit.trained, self._updater.states(unit.trained), strict=True)):
                shape, own = member.master.shape, state
                if not own:  # of the first update: made for a parameter of two elements
                    value, own = torch.zeros(2, dtype=member.master.dtype), {}
                    part.step([value], [torch.zeros_like(value)], [own], groups, [n])
                    shape = value.shape
                keys = (key for key, v in own.items() if isinstance(v, torch.Tensor) and v.shape == shape and key != "step")
                found.setdefault(tuple(keys), n)
        if len(found) > 1:
            raise Unsupported(
                f"the states of `{unit.name}` cannot be in `{unit.placement.states}`: its parameters have different ones",
                hint="use the same settings for its parameters, or plan with another tier for states",
            )
        return list(next(iter(found), ()))

    def refill(self, unit: PlacedUnit) -> None:
        """Copy states that are not in their sections yet, such as loaded ones, there."""
        sections = self._sections[unit.name]
        with self._updater.quiet():
            for n, state in enumerate(self._updater.states(unit.trained)):
                for key in sections.states:
                    value, view = state.get(key), sections.views[key][n]
                    if isinstance(value, torch.Tensor) and value is not view:
                        copy_tensor(view, value)
                        self._take(unit, n, key)

    def _take(self, unit: PlacedUnit, n: int, key: str) -> None:
        """Let the optimizer's state be the section's memory."""
        view = self._sections[unit.name].views[key][n]
        self._updater.optimizer.state[unit.trained[n].master][key] = view
        self._updater.away.add(view.untyped_storage()._cdata)

    def holds(self, unit: PlacedUnit, state: torch.Tensor) -> bool:
        """Does this state lie in a section?"""
        sections = self._sections.get(unit.name)
        storages = {views[0].untyped_storage()._cdata for views in sections.views.values()} if sections is not None else set()
        return state.untyped_storage()._cdata in storages

    def return_states(self, unit: PlacedUnit, room: HostRoom) -> None:
        """States of the unit as ordinary memory where their parameters came from; what the host cannot hold stays in files."""
        self._forget()
        sections = self._sections.get(unit.name)
        for key in sections.states if sections is not None else ():
            assert sections is not None
            held = [(m, s) for m, s in zip(unit.trained, self._updater.states(unit.trained), strict=True) if key in s]
            held = [(m, s) for m, s in held if self.holds(unit, s[key])]
            to_host = any(m.came_from.type == "cpu" for m, _ in held)
            if to_host and room.stays(sections.tickets[key], unit.wide.nbytes):
                self._lane.leave(sections.tickets[key])
                continue
            for m, state in held:
                state[key] = state[key].to(m.came_from, copy=True)
            self._lane.free(sections.tickets[key])
        self._sections.pop(unit.name, None)

    def close(self) -> None:
        """Let go of the rooms of stretches."""
        for room in self._rooms:
            self._lane.free(room.ticket)
        self._sections, self._rooms, self._away = {}, [], []

    # updates

    def expect(self, units: Iterable[PlacedUnit]) -> None:
        """Updates of these will be asked for next, in this order."""
        for unit in units:
            if unit.is_away:
                self.refill(unit)  # the loop may have put others into the optimizer
                self._queue.extend((unit, begin, end) for begin, end in stretches(unit.wide.nbytes, self._stretch))

    def saving(self, unit: PlacedUnit, update: Future[Any] | None) -> Saving:
        """What goes on after the update of a unit: its last stretches are written."""
        return Saving(unit, self._lane, self._sections[unit.name].tickets.values(), update)

    def update(self, unit: PlacedUnit, order: Order, grads: Sequence[torch.Tensor]) -> Any:
        """As `Updater.on_host`."""
        with self._lock, self._updater.quiet():
            check_whole(unit)
            is_begun = False
            try:
                running = StretchedUpdate(unit, order, grads, self._sections[unit.name], self._updater)
                for stretch in self._each(unit):
                    running.make(stretch, self._size)
                    is_begun = True
                    self._save(stretch)
                for n, key in running.end():
                    self._take(unit, n, key)
            except BaseException as error:
                unit.is_torn = is_begun or isinstance(error, DiskError)  # else as with any error of the update
                self._forget()
                if isinstance(error, DiskError):
                    raise torn(unit, error) from error
                raise
        return None if unit.is_streamed else self._updater.refresh(unit, order)

    def _each(self, unit: PlacedUnit) -> Iterator[ComingStretch]:
        """The stretches of a unit, each when it has arrived; others are on their way meanwhile."""
        own = list(stretches(unit.wide.nbytes, self._stretch))
        following = self._coming[0].unit if self._coming else self._queue[0][0] if self._queue else None
        if following is not unit:  # asked for in another order
            self._forget()
            self.expect([unit])
        for begin, _ in own:
            self._read_on()
            stretch = self._coming.popleft()
            assert stretch.unit is unit and stretch.begin == begin, "stretches come in the order of updates"
            for copy in stretch.coming:
                copy.wait()
            yield stretch

    def _read_on(self) -> None:
        while self._queue and len(self._coming) < len(self._rooms):
            unit, begin, end = self._queue.popleft()
            tickets = self._sections[unit.name].tickets.values()
            if begin == 0:
                self._before[unit.name] = [ticket.out for ticket in tickets if ticket.out is not None]
            room = self._rooms[self._turn % len(self._rooms)]
            self._turn += 1
            after = [*room.busy, *self._before[unit.name]]
            coming = [
                self._lane.load(ticket, begin, self._part(room, n, end - begin), after=after)
                for n, ticket in enumerate(tickets)
            ]
            self._coming.append(ComingStretch(unit, begin, end, room, [copy for copy in coming if copy is not None]))

    def _save(self, stretch: ComingStretch) -> None:
        tickets = self._sections[stretch.unit.name].tickets.values()
        size = stretch.end - stretch.begin
        saved = [self._lane.save(ticket, stretch.begin, self._part(stretch.room, n, size)) for n, ticket in enumerate(tickets)]
        stretch.room.busy = [copy for copy in saved if copy is not None]

    def _part(self, room: StretchRoom, section: int, nbytes: int) -> torch.Tensor:
        return room.memory[section * self._size : section * self._size + nbytes]

    def _forget(self) -> None:
        """Nothing is expected any more."""
        self._queue.clear()
        for stretch in self._coming:
            for copy in stretch.coming:
                copy.settle()
        self._coming.clear()
