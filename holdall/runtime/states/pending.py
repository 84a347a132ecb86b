"""Updates that are under way, and whoever must wait for them.

An update that is made beside the loop is known here by its unit, until somebody needs what it makes: the forward of a module
that uses the unit; the loop, where it touches a parameter or a state (`guard.py` tells); or whoever wants all to be over. Where
the weights are made first (`update_weights_first.py`), a forward waits for them alone, and the loop for the rest too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.guard import Guard
from holdall.runtime.states.unit import PlacedUnit
from holdall.tiers import let_wait


class Pending:
    """`settle`: called when the loop touches what an update is about to change."""

    def __init__(self, units: Sequence[PlacedUnit], device: torch.device, settle: Callable[[], None]) -> None:
        self._units = units
        self._device = device
        self._settle = settle
        self._updates: dict[str, Any] = {}  # unit -> future or event of its update
        self._rests: list[tuple[PlacedUnit, Future[None]]] = []  # of parameters and states whose new weights were made first
        self._homes: set[int] = set()  # storages of homes whose update is under way
        self._by_home = {id(m.home): u for u in units for m in u.members if m.is_swapped}
        self._by_work = {id(m.work): m for u in units for m in u.members if m.is_swapped}
        self.guard = Guard(self)

    def add(self, unit: PlacedUnit, update: Any) -> None:
        """An update was begun. `update`: a future of an event, an event, or None where it is over already."""
        if unit.name in self._updates:  # nobody read the unit since the one before
            self.finish(unit)
        self._updates[unit.name] = update

    def add_rest(self, unit: PlacedUnit, rest: Future[None]) -> None:
        """The unit's weights are its update's; its parameters and states follow."""
        self._rests.append((unit, rest))

    @property
    def are_some(self) -> bool:
        """Whether updates were begun whose weights nobody has asked for yet."""
        return bool(self._updates)

    def count_late(self) -> int:
        """How many parameters and states have not followed their weights yet."""
        over, self._rests = [r for r in self._rests if r[1].done()], [r for r in self._rests if not r[1].done()]
        for _, rest in over:
            rest.result()  # an error is raised
        return len(self._rests)

    def finish(self, unit: PlacedUnit) -> None:
        """From here on the unit's new weights may be used."""
        if unit.name not in self._updates:
            return
        update = self._updates.pop(unit.name)
        event = update.result() if hasattr(update, "result") else update
        unit.note_update()
        unit.end_update()
        if event is not None:
            let_wait(event, self._device)

    def finish_all(self) -> None:
        """The same of every unit, parameters and states too; an error in one of the updates is raised when all are over."""
        wrong: Exception | None = None
        for finish in self._all():
            try:
                finish()
            except Exception as error:  # of the user's optimizer, or for want of memory
                wrong = wrong or error
        self.guard.calm()
        if wrong is not None:
            raise wrong

    def _all(self) -> Iterator[Callable[[], None]]:
        yield from (partial(self.finish, unit) for unit in self._units)
        rests, self._rests = self._rests, []
        yield from (rest.result for _, rest in rests)

    def raise_guard(self, optimizer: torch.optim.Optimizer) -> None:
        """The loop goes on by itself: what updates will still change is not to be read before."""
        late = {u.name for u, rest in self._rests if not rest.done()} | set(self._updates)
        if late and not self.guard.can_rise():
            self._settle()  # nobody would look
            self.watch()
            return
        under_way = [m for u in self._units if u.name in late for m in u.trained]
        self._homes = {m.home.untyped_storage()._cdata for m in under_way}
        for m in under_way:
            values = optimizer.state.get(m.home, {}).values()
            self._homes |= {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
        if late:
            self.guard.rise()
        else:
            self.watch()

    def watch(self) -> None:
        """The loop goes on by itself: what it writes into parameters is noticed, or assumed."""
        if self.guard.can_watch():
            self.guard.watch()
        else:
            for unit in self._units:
                unit.is_doubtful = True

    # what the guard asks

    def written(self, tensor: torch.Tensor) -> None:
        """A home, or what shares its memory, may have been written into without a version that tells."""
        unit = self._by_home.get(id(tensor))
        if unit is not None:
            unit.is_doubtful = True
        elif not isinstance(tensor, torch.nn.Parameter):
            key = tensor.untyped_storage()._cdata
            for unit in self._units:
                unit.is_doubtful |= any(m.home.untyped_storage()._cdata == key for m in unit.members if m.is_swapped)

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """`home.data = value`: a home stays where its update happens, so the value is written into it."""
        if id(tensor) not in self._by_home:
            return False
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise Unsupported(
                f"a placed parameter of {list(tensor.shape)}, {tensor.dtype}, cannot become {list(value.shape)}, {value.dtype}",
                hint="close the harness first, and call `fit` again afterwards",
            )
        with torch.no_grad():
            tensor.copy_(value)
        return True

    def home_of(self, tensor: torch.Tensor) -> torch.Tensor:
        member = self._by_work.get(id(tensor))
        return tensor if member is None else member.home

    def touched(self, key: int) -> None:
        """If the update of whoever owns this storage is under way, it comes to its end."""
        if key in self._homes:
            self._homes = set()
            self._settle()
