"""Updates that are under way, and whoever must wait for them.

An update that is made beside the loop is known here by its unit, until somebody needs what it makes: the forward of a module
that uses the unit; the loop, where it touches a parameter or a state (`guard.py` tells); or whoever wants all to be over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdall.runtime.guard import Guard
from holdall.runtime.units import Unit


class Pending:
    """`settle`: called when the loop touches what an update is about to change."""

    def __init__(self, units: Sequence[Unit], device: torch.device, settle: Callable[[], None]) -> None:
        self._units = units
        self._device = device
        self._settle = settle
        self._updates: dict[str, Any] = {}  # unit -> future or event of its update
        self._homes: set[int] = set()  # storages of homes whose update is under way
        self.guard = Guard(self._touched)

    def add(self, unit: Unit, update: Any) -> None:
        """An update was begun. `update`: a future of an event, an event, or None where it is over already."""
        self._updates[unit.name] = update

    def finish(self, unit: Unit) -> None:
        """From here on the unit's new weights may be used."""
        if unit.name not in self._updates:
            return
        update = self._updates.pop(unit.name)
        event = update.result() if hasattr(update, "result") else update
        unit.note_versions()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def finish_all(self) -> None:
        """The same of every unit; an error in one of the updates is raised when all are over."""
        wrong: Exception | None = None
        for unit in self._units:
            try:
                self.finish(unit)
            except Exception as error:  # of the user's optimizer, or for want of memory
                wrong = wrong or error
        self.guard.lower()
        if wrong is not None:
            raise wrong

    def raise_guard(self, optimizer: torch.optim.Optimizer) -> None:
        """The step is over and the loop goes on: what updates will still change is not to be read before."""
        under_way = [m for u in self._units if u.name in self._updates for m in u.trained]
        self._homes = {m.home.untyped_storage()._cdata for m in under_way}
        for m in under_way:
            values = optimizer.state.get(m.home, {}).values()
            self._homes |= {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
        if self._updates:
            self.guard.rise()

    def _touched(self, key: int) -> None:
        """If the update of whoever owns this storage is under way, it comes to its end."""
        if key in self._homes:
            self._homes = set()
            self._settle()
