"""Host updates that keep the old values for a while.

    speculative     begun before the loop can clip; the new values stay in spare memory until `accept` or dropped
    weights first   a quick pass writes the new weights to spare memory, since a forward waits for them; parameters
                    and states follow later (`catch_up`), from the same gradient

Both need a second buffer for a unit's weights on the host. The two are swapped: the buffer that held the gradient is spare when
the new weights are in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from holdall.errors import OverBudget
from holdall.runtime.states.packing import Layout, like
from holdall.runtime.states.unit import HOST, Member, PlacedUnit
from holdall.runtime.states.updating.updater import Order, Updater
from holdall.tiers import Ticket
from holdall.tiers._buffers import copy_tensor, touch
from holdall.tiers._chaos import current
from holdall.tiers._keepers import Keepers
from holdall.types import Progress
from holdall.types.plan import silent
from holdall.updates.parts import Groups, snapshot


@dataclass(slots=True)
class SpeculativeUpdate:
    """An update computed before clipping is decided; its values are kept separately from the old ones."""

    groups: Groups
    which: tuple[int, ...]
    members: list[Member]
    steps: list[torch.Tensor] = field(default_factory=list)
    done: Future[None] | None = None


@dataclass(slots=True)
class Spare:
    """Host memory for new values while the old ones are kept."""

    tickets: tuple[Ticket, Ticket]  # (parameters and moments, new working weights)
    new: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # trained member -> (parameter, both moments)
    weights: list[torch.Tensor]


class OutOfPlaceUpdate:
    """Makes out-of-place updates with the updater's kernel. All changes to units run in order in the updater's one thread."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._spares: dict[str, Spare | None] = {}
        self._moved: set[str] = set()  # units whose parameters now live in spare memory

    # speculative updates

    def attempt(
        self, unit: PlacedUnit, groups: Groups, which: tuple[int, ...], grads: Callable[[], list[torch.Tensor]]
    ) -> SpeculativeUpdate | None:
        """Begin the update as if gradients were not clipped, leaving the old values; None: not possible for this unit."""
        if unit.is_streamed and len(unit.trained) < len(unit.members):
            return None
        members = [unit.trained[n] for n in which]
        spare = self._spare(unit, groups, members)
        if spare is None:
            return None
        states = self._updater.states(members)
        attempt = SpeculativeUpdate(groups, which, members)
        order = Order(groups, which, None, None)

        def job() -> None:
            with self._updater.quiet():
                attempt.steps = [s["step"].clone() for s in states]  # read here: the previous update may still be finishing
                self._updater.one_pass(
                    unit,
                    order,
                    [m.master.detach() for m in members],
                    grads(),
                    states,
                    None,
                    [spare.weights[n] for n in which],
                    steps=attempt.steps,
                    into=[spare.new[n] for n in which],
                )

        attempt.done = self._updater.submit(job)
        return attempt

    def accept(self, unit: PlacedUnit, attempt: SpeculativeUpdate, order: Order) -> Any:
        """Gradients were not clipped: make the speculative values the parameters and states. Returns as `on_host`."""
        spare, updater = self._spares[unit.name], self._updater
        assert spare is not None and attempt.done is not None and updater.back is not None and unit.flat is not None
        attempt.done.result()
        self._moved.add(unit.name)
        for n, m, step in zip(attempt.which, attempt.members, attempt.steps, strict=True):
            state = updater.optimizer.state[m.master]
            old = (m.master.data, state["exp_avg"], state["exp_avg_sq"])
            m.master.data, state["exp_avg"], state["exp_avg_sq"] = spare.new[n]
            spare.new[n] = old
            _poison(old)
            state["step"].copy_(step)
            updater.away.add(m.master.untyped_storage()._cdata)
        if unit.is_streamed:
            for n, m in enumerate(unit.trained):
                if n not in attempt.which:  # not updated: copy the old value
                    copy_tensor(spare.weights[n], m.master.data)
            self._exchange(unit, spare)
            _poison(spare.weights)
            return None
        if len(attempt.which) == len(unit.members):
            return updater.back.pull(spare.tickets[1], unit.flat, after=order.after)
        for n in attempt.which:
            copy_tensor(unit.trained[n].working.data, spare.weights[n])
        return None

    # weights first

    def can_be_first(self, unit: PlacedUnit, order: Order) -> bool:
        """Can the weights be computed first? The whole unit must be updated, and its buffers must be swappable."""
        is_whole = len(order.which) == len(unit.members)
        swaps = not unit.is_streamed or unit.source is unit.buffer
        return is_whole and swaps and self._spare(unit, order.groups, unit.trained) is not None

    def weights_first(self, unit: PlacedUnit, order: Order, grads: list[torch.Tensor]) -> Any:
        """Compute the new weights; returns as `on_host`. The gradients stay in the buffer that is now spare."""
        spare, updater = self._spares[unit.name], self._updater
        assert spare is not None and updater.back is not None and unit.flat is not None
        with updater.quiet():
            states = updater.states(unit.trained)
            updater.one_pass(unit, order, _masters(unit), grads, states, _on_host(order), spare.weights, peek=True)
        self._exchange(unit, spare)
        if unit.is_streamed:
            return None
        assert unit.buffer is not None
        return updater.back.pull(unit.buffer, unit.flat, after=order.after)

    def catch_up(self, unit: PlacedUnit, order: Order, grads: list[torch.Tensor]) -> None:
        """Update the parameters and states after `weights_first`."""
        with self._updater.quiet():
            states = self._updater.states(unit.trained)
            self._updater.one_pass(unit, order, _masters(unit), grads, states, _on_host(order), None)
        _poison(grads)

    # spare memory

    def reserve(self, units: Sequence[PlacedUnit], progress: Progress = silent) -> None:
        """Allocate all spare memory before the first step: first touching a page costs more than updating it."""
        updater = self._updater
        groups = snapshot(updater.optimizer)
        wanted = [u for u in units if u.update == HOST and u.trained and self._may_have_spare(u, groups, u.trained)]
        for done, unit in enumerate(wanted):
            progress("taking host memory for early updates", done, len(wanted), "")
            assert updater.lane is not None
            spare = self._spares[unit.name] = _make_spare(unit, updater.lane)
            if spare is not None:
                with updater.quiet():
                    touch(updater.lane.memory(spare.tickets[0]))  # the other was touched when it was pinned

    def _spare(self, unit: PlacedUnit, groups: Groups, members: list[Member]) -> Spare | None:
        """Spare memory for the unit's new values; None: there is none, or the fast kernel does not apply."""
        updater = self._updater
        if not self._may_have_spare(unit, groups, members) or not all(updater.states(members)):
            return None
        if unit.name not in self._spares and updater.lane is not None:
            self._spares[unit.name] = _make_spare(unit, updater.lane)
        return self._spares[unit.name]

    def _may_have_spare(self, unit: PlacedUnit, groups: Groups, members: list[Member]) -> bool:
        updater = self._updater
        return updater.lane is not None and unit.is_narrow and updater.is_plain_adam(groups, members)

    def _exchange(self, unit: PlacedUnit, spare: Spare) -> None:
        """Swap the spare weight buffer with the live one."""
        lane = self._updater.lane
        old, new = unit.buffer, spare.tickets[1]
        if unit.is_streamed:
            old = unit.source
            unit.source = new
        assert lane is not None and old is not None
        unit.buffer = new if unit.buffer is old else unit.buffer
        spare.tickets = (spare.tickets[0], old)
        spare.weights = unit.grads.views(lane.memory(old))

    def has_moved(self, unit: PlacedUnit) -> bool:
        """Do the unit's parameters live in former spare memory?"""
        return unit.name in self._moved

    def free_spares(self) -> None:
        for spare in self._spares.values():
            if spare is not None and self._updater.lane is not None:
                for ticket in spare.tickets:
                    self._updater.lane.free(ticket)
        self._spares = {}


def _make_spare(unit: PlacedUnit, lane: Keepers) -> Spare | None:
    layout = Layout.of(pattern for m in unit.trained for pattern in (like(m.master),) * 3)
    try:
        values = lane.reserve(layout.nbytes, pinned=False)
        weights = lane.reserve(unit.grads.nbytes)
    except OverBudget:
        return None  # without spare memory, updates wait for the norm
    views = layout.views(lane.memory(values))
    new = {n: (views[3 * n], views[3 * n + 1], views[3 * n + 2]) for n in range(len(unit.trained))}
    return Spare((values, weights), new, unit.grads.views(lane.memory(weights)))


def _masters(unit: PlacedUnit) -> list[torch.Tensor]:
    return [m.master.detach() for m in unit.trained]


def _poison(used_up: Sequence[torch.Tensor]) -> None:
    chaos = current()
    if chaos is not None:
        chaos.poison(*used_up)


def _on_host(order: Order) -> torch.Tensor | None:
    return order.scale.cpu() if order.scale is not None else None
