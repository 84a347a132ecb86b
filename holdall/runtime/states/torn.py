"""Units that an error of the disk has torn: an update of their states was interrupted, so some are new and some are old."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdall.errors import DiskError

if TYPE_CHECKING:
    from holdall.runtime.states.unit import PlacedUnit


def check_whole(*units: PlacedUnit) -> None:
    """Raise if an error has interrupted an update of any."""
    for unit in units:
        if unit.is_torn:
            raise torn(unit)


def torn(unit: PlacedUnit, error: Exception | None = None) -> DiskError:
    why = f": {getattr(error, 'fact', error)}" if error is not None else " by an error of the disk"
    return DiskError(
        f"the update of `{unit.name}` was interrupted{why}; some states of the model are new, some are old",
        hint="start again from the last checkpoint: `holdall.load_checkpoint`, or `holdall train --resume`",
    )
