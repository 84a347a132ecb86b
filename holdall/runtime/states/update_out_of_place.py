"""Updates on the host that leave the old values where they are, for a time or for good.

    attempt         begun before the loop can clip; its values lie in spare room until it is `accept`ed or forgotten
    weights first   the new weights go to spare room in a quick walk, since a forward waits for them; parameters and states
                    follow when nobody waits (`catch_up`), from the same gradient

Both need a second buffer of a unit's weights on the host. It changes places with the first: what held the gradient is spare
when the new weights are in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from holdall.errors import OverBudget
from holdall.runtime.states.unit import HOST, Layout, Member, PlacedUnit, like
from holdall.runtime.states.updates import Order, Updater
from holdall.tiers import Ticket
from holdall.tiers._buffers import copy_tensor, touch
from holdall.tiers._chaos import current
from holdall.tiers._keepers import Keepers
from holdall.types import Progress
from holdall.types.plan import silent
from holdall.updates.parts import Groups, snapshot


@dataclass(slots=True)
class SpeculativeUpdate:
    """An update made before it is known whether its gradients will be clipped; its values lie beside the old ones."""

    groups: Groups
    which: tuple[int, ...]
    members: list[Member]
    steps: list[torch.Tensor] = field(default_factory=list)
    done: Future[None] | None = None


@dataclass(slots=True)
class Spare:
    """Room on the host for values beside the old ones."""

    tickets: tuple[Ticket, Ticket]  # of parameters and moments; of the new working weights
    new: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # trained member -> parameter, moments
    weights: list[torch.Tensor]


class OutOfPlaceUpdate:
    """Makes them, by the updater's kernel. All that changes a unit here runs in the updater's one thread, in order."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._spares: dict[str, Spare | None] = {}
        self._moved: set[str] = set()  # units whose parameters have come to lie in spare room

    # begun ahead

    def attempt(
        self, unit: PlacedUnit, groups: Groups, which: tuple[int, ...], grads: Callable[[], list[torch.Tensor]]
    ) -> SpeculativeUpdate | None:
        """Begin the update as if gradients were not clipped, without touching what is there; None: not for this unit."""
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
                attempt.steps = [s["step"].clone() for s in states]  # not before: the update before may be catching up
                self._updater.one_pass(
                    unit,
                    order,
                    members,
                    grads(),
                    states,
                    None,
                    [spare.weights[n] for n in which],
                    steps=attempt.steps,
                    into=[spare.new[n] for n in which],
                    is_awaited=False,
                )

        attempt.done = self._updater.submit(job)
        return attempt

    def accept(self, unit: PlacedUnit, attempt: SpeculativeUpdate, order: Order) -> Any:
        """The gradients were not clipped: the attempt's values become the parameters and states. Returns as `on_host`."""
        spare, updater = self._spares[unit.name], self._updater
        assert spare is not None and attempt.done is not None and updater.back is not None and unit.flat is not None
        attempt.done.result()
        self._moved.add(unit.name)
        for n, m, step in zip(attempt.which, attempt.members, attempt.steps, strict=True):
            state = updater.optimizer.state[m.home]
            old = (m.home.data, state["exp_avg"], state["exp_avg_sq"])
            m.home.data, state["exp_avg"], state["exp_avg_sq"] = spare.new[n]
            spare.new[n] = old
            _poison(old)
            state["step"].copy_(step)
            updater.away.add(m.home.untyped_storage()._cdata)
        if unit.is_streamed:
            for n, m in enumerate(unit.trained):
                if n not in attempt.which:  # not updated: as it was
                    copy_tensor(spare.weights[n], m.home.data)
            self._exchange(unit, spare)
            _poison(spare.weights)
            return None
        if len(attempt.which) == len(unit.members):
            return updater.back.pull(spare.tickets[1], unit.flat, after=order.after)
        for n in attempt.which:
            copy_tensor(unit.trained[n].work.data, spare.weights[n])
        return None

    # weights first

    def can_be_first(self, unit: PlacedUnit, order: Order) -> bool:
        """Whether the weights may be made apart: all of the unit is updated, and its buffers can change places."""
        is_whole = len(order.which) == len(unit.members)
        swaps = not unit.is_streamed or unit.source is unit.buffer
        return is_whole and swaps and self._spare(unit, order.groups, unit.trained) is not None

    def weights_first(self, unit: PlacedUnit, order: Order, grads: list[torch.Tensor]) -> Any:
        """Make the new weights; returns as `on_host`. The gradients stay, in what is the spare buffer from here on."""
        spare, updater = self._spares[unit.name], self._updater
        assert spare is not None and updater.back is not None and unit.flat is not None
        with updater.quiet():
            states = updater.states(unit.trained)
            updater.one_pass(unit, order, unit.trained, grads, states, _on_host(order), spare.weights, peek=True)
        self._exchange(unit, spare)
        if unit.is_streamed:
            return None
        assert unit.buffer is not None
        return updater.back.pull(unit.buffer, unit.flat, after=order.after)

    def catch_up(self, unit: PlacedUnit, order: Order, grads: list[torch.Tensor]) -> None:
        """Parameters and states of what `weights_first` has begun."""
        with self._updater.quiet():
            states = self._updater.states(unit.trained)
            self._updater.one_pass(unit, order, unit.trained, grads, states, _on_host(order), None, is_awaited=False)
        _poison(grads)

    # spare room

    def reserve(self, units: Sequence[PlacedUnit], progress: Progress = silent) -> None:
        """Take all of it, before the first step: a page that is touched for the first time costs more than the update of it."""
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
        """Room for the unit's new values; None: there is none, or its update is not by the fast kernel."""
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
        """The new weights are those that will be fetched, or sent; what was there before is room for the next ones."""
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
        """Whether the unit's parameters lie in what was spare room once."""
        return unit.name in self._moved

    def free_spares(self) -> None:
        for spare in self._spares.values():
            if spare is not None and self._updater.lane is not None:
                for ticket in spare.tickets:
                    self._updater.lane.free(ticket)
        self._spares = {}


def _make_spare(unit: PlacedUnit, lane: Keepers) -> Spare | None:
    layout = Layout.of(pattern for m in unit.trained for pattern in (like(m.home),) * 3)
    try:
        values = lane.reserve(layout.nbytes, pinned=False)
        weights = lane.reserve(unit.grads.nbytes)
    except OverBudget:
        return None  # without room, updates wait for the norm
    views = layout.views(lane.memory(values))
    new = {n: (views[3 * n], views[3 * n + 1], views[3 * n + 2]) for n in range(len(unit.trained))}
    return Spare((values, weights), new, unit.grads.views(lane.memory(weights)))


def _poison(used_up: Sequence[torch.Tensor]) -> None:
    chaos = current()
    if chaos is not None:
        chaos.poison(*used_up)


def _on_host(order: Order) -> torch.Tensor | None:
    return order.scale.cpu() if order.scale is not None else None
