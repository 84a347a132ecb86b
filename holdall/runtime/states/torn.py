"""Steps that an error of the disk has torn: it interrupted the updates, so some states are new and some are old.

A checkpoint of them would be of no step. Whoever saves is refused, and goes on from the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from holdall.errors import DiskError, HoldallError

if TYPE_CHECKING:
    from holdall.runtime.states.unit import PlacedUnit

_HINT = "start again from the last checkpoint: `holdall.load_checkpoint`, or `holdall train --resume`"


class Saved(Protocol):
    """What a checkpoint is made of: the engine."""

    units: list[PlacedUnit]
    is_half_made: bool  # a backward has begun to make its updates, and did not end


def before_saving(saved: Saved, finish: Callable[[], None]) -> None:
    """Finish what is running; raise if an error has interrupted an update, or a backward between two of its updates."""
    finish()
    check_whole(*saved.units)
    if saved.is_half_made:
        what = "the last backward was interrupted between two of its updates"
        raise HoldallError(f"{what}; some states of the model are new, some are old", hint=_HINT)


def check_whole(*units: PlacedUnit) -> None:
    """Raise if an error has interrupted an update of any."""
    for unit in units:
        if unit.is_torn:
            raise torn(unit)


def torn(unit: PlacedUnit, error: Exception | None = None) -> DiskError:
    why = f": {getattr(error, 'fact', error)}" if error is not None else " by an error of the disk"
    return DiskError(
        f"the update of `{unit.name}` was interrupted{why}; some states of the model are new, some are old",
        hint=_HINT,
    )


@contextmanager
def tearing(unit: PlacedUnit) -> Iterator[None]:
    """An error of the disk in here interrupts the unit's update."""
    try:
        yield
    except DiskError as error:
        if unit.is_torn:
            raise
        unit.is_torn = True
        raise torn(unit, error) from error
