"""Tracks running updates and waits for them.

A running update is stored by its unit until its result is needed: by the forward of a module that uses the unit; by the loop,
when it touches a parameter or a state (`guard.py` reports that); or by a call that finishes all. Where the weights are computed
first (`weights_first.py`), a forward waits only for them, and the loop also for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.guard import Guard
from holdall.runtime.states.torn import tearing
from holdall.runtime.states.unit import PlacedUnit
from holdall.tiers import let_wait


class Rest(Protocol):
    """A future, or what is like one."""

    def done(self) -> bool: ...

    def result(self) -> None: ...


class Pending:
    """`settle`: called when the loop touches a tensor that a running update will change."""

    def __init__(self, units: Sequence[PlacedUnit], device: torch.device, settle: Callable[[], None]) -> None:
        self._units = units
        self._device = device
        self._settle = settle
        self._updates: dict[str, Any] = {}  # unit -> future or event of its update
        self._rests: list[tuple[PlacedUnit, Rest]] = []  # parameters and states whose new weights were computed first
        self._masters: set[int] = set()  # storages of masters whose update is running
        self._by_master = {id(m.master): u for u in units for m in u.members if m.is_swapped}
        self._by_working = {id(m.working): m for u in units for m in u.members if m.is_swapped}
        self.guard = Guard(self)

    def add(self, unit: PlacedUnit, update: Any) -> None:
        """An update has begun. `update`: a future of an event, an event, or None if it is finished."""
        if unit.name in self._updates:  # the unit was not read since its previous update
            self.finish(unit)
        self._updates[unit.name] = update

    def add_rest(self, unit: PlacedUnit, rest: Rest) -> None:
        """The unit's weights are new; its parameters and states follow."""
        self._rests.append((unit, rest))

    @property
    def are_some(self) -> bool:
        """Are there running updates whose weights were not needed yet?"""
        return bool(self._updates)

    def count_late(self) -> int:
        """Number of units whose parameters and states are not updated yet."""
        over, self._rests = [r for r in self._rests if r[1].done()], [r for r in self._rests if not r[1].done()]
        for _, rest in over:
            rest.result()  # raises the update's error
        return len(self._rests)

    def finish(self, unit: PlacedUnit) -> None:
        """Wait until the unit's new weights can be used."""
        if unit.name not in self._updates:
            return
        update = self._updates.pop(unit.name)
        with tearing(unit):
            event = update.result() if hasattr(update, "result") else update
            if event is not None:
                let_wait(event, self._device)
        unit.note_update()
        unit.end_update()

    def finish_all(self) -> None:
        """Wait for every unit, including parameters and states; raise the first error after all have finished."""
        wrong: Exception | None = None
        for finish in self._all():
            try:
                finish()
            except Exception as error:  # from the user's optimizer, or out of memory
                wrong = wrong or error
        self.guard.calm()
        if wrong is not None:
            raise wrong

    def _all(self) -> Iterator[Callable[[], None]]:
        yield from (partial(self.finish, unit) for unit in self._units)
        rests, self._rests = self._rests, []
        yield from (rest.result for _, rest in rests)

    def raise_guard(self, optimizer: torch.optim.Optimizer) -> None:
        """The loop continues: make it wait before it reads what updates will change."""
        late = {u.name for u, rest in self._rests if not rest.done()} | set(self._updates)
        if late and not self.guard.can_rise():
            self._settle()  # the guard cannot be entered: finish now
            self.watch()
            return
        under_way = [m for u in self._units if u.name in late for m in u.trained]
        self._masters = {m.master.untyped_storage()._cdata for m in under_way}
        for m in under_way:
            values = optimizer.state.get(m.master, {}).values()
            self._masters |= {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
        if late:
            self.guard.rise()
        else:
            self.watch()

    def watch(self) -> None:
        """The loop continues: detect its writes to parameters, or assume them."""
        if self.guard.can_watch():
            self.guard.watch()
        else:
            for unit in self._units:
                unit.is_doubtful = True

    # called by the guard

    def written(self, tensor: torch.Tensor) -> None:
        """A master, or a tensor sharing its memory, may have been written without a new version."""
        unit = self._by_master.get(id(tensor))
        if unit is not None:
            unit.is_doubtful = True
        elif not isinstance(tensor, torch.nn.Parameter):
            key = tensor.untyped_storage()._cdata
            for unit in self._units:
                unit.is_doubtful |= any(m.master.untyped_storage()._cdata == key for m in unit.members if m.is_swapped)

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """`master.data = value`: copy the value, since a master stays where its update is made."""
        if id(tensor) not in self._by_master:
            return False
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise Unsupported(
                f"a parameter of {list(tensor.shape)}, {tensor.dtype}, cannot become {list(value.shape)}, {value.dtype}",
                hint="call `harness.close()`, change it, and call `fit` again",
            )
        with torch.no_grad():
            tensor.copy_(value)
        return True

    def master_of(self, tensor: torch.Tensor) -> torch.Tensor:
        member = self._by_working.get(id(tensor))
        return tensor if member is None else member.master

    def touched(self, key: int) -> None:
        """Finish the update that owns this storage, if it is running."""
        if key in self._masters:
            self._masters = set()
            self._settle()
