"""Masters and states of all units as ordinary memory again, one unit after the other, when a plan is taken down."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from holdall.runtime.states.host_room import HostRoom
from holdall.runtime.states.unit import PlacedUnit
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
        unit.put_back(store, room, in_store=beside is not None and beside.has_moved(unit))
    if stretched is not None:
        stretched.close()
    if room.left:
        logger.warning("the host has no room for all states: %s stay in files, mapped as memory", format_bytes(room.left))
