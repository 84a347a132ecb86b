"""Masters and states of all units as ordinary memory again, one unit after the other, when a plan is taken down."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdall.runtime.states.host_room import HostRoom
from holdall.runtime.states.unit import PlacedUnit, at_home
from holdall.runtime.states.updating.in_stretches import InStretches
from holdall.runtime.states.updating.out_of_place import OutOfPlaceUpdate
from holdall.runtime.states.updating.updater import Updater
from holdall.tiers._keepers import Keepers
from holdall.units import format_bytes

logger = logging.getLogger(__name__)


def put_units_back(
    units: Iterable[PlacedUnit],
    store: Keepers | None,
    updater: Updater | None = None,
    stretched: InStretches | None = None,
    beside: OutOfPlaceUpdate | None = None,
) -> None:
    """`updater`, `stretched`, `beside`: who holds states of the units, if anyone."""
    room = HostRoom(store)
    for unit in units:
        room.has(3 * unit.wide.nbytes)  # or stores let go of what they keep
        if stretched is not None:
            stretched.return_states(unit, room)
        if updater is not None:
            updater.return_states(unit)
        put_unit_back(unit, store, room, in_store=beside is not None and beside.has_moved(unit))
    if stretched is not None:
        stretched.close()
    if room.left:
        logger.warning("the host has no room for all states: %s stay in files, mapped as memory", format_bytes(room.left))


def put_unit_back(unit: PlacedUnit, store: Keepers | None, room: HostRoom, *, in_store: bool) -> None:
    """Homes as ordinary memory on the device that they came from. `in_store`: the store's memory holds some of them."""
    to_host = any(m.came_from.type == "cpu" for m in unit.trained)
    stays = to_host and not in_store and room.stays(unit.far_masters, unit.wide.nbytes)
    homes = {id(m) for m in at_home(unit)}
    for m in unit.members:
        grad, m.master.grad = m.master.grad, None
        is_ours = in_store or (unit.masters if id(m) in homes else unit.far_masters) is not None
        if is_ours and (id(m) in homes or not stays):
            m.master.data = m.master.data.to(m.came_from, copy=True)
        if m.master.device != m.came_from:
            m.master.data = m.master.data.to(m.came_from)
        m.working = m.master
        if grad is not None and not unit.needs_working:  # a gradient of its own, not one of ours
            m.master.grad = grad.to(m.came_from)
    for ticket in {id(t): t for t in (unit.masters, unit.far_masters, unit.buffer, unit.source) if t is not None}.values():
        if store is not None and stays and ticket is unit.far_masters:
            store.leave(ticket)
        elif store is not None:
            store.free(ticket)
    if unit.flat is not None:  # a loss that the loop still holds refers to the working weights; free their memory
        unit.flat.untyped_storage().resize_(0)
        unit.flat = None
