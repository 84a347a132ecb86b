"""Computes the new weights before the rest of a host update where a forward waits for them.

That is so where gradients are clipped: updates cannot begin before all gradients are there, and the next forward needs the
weights at once. Computing the weights alone moves little more than half of the bytes. Parameters and states follow, overlapping
the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from holdall.runtime.states.gradients.entry import GradEntry
from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.updating.out_of_place import OutOfPlaceUpdate
from holdall.runtime.states.updating.pending import Pending
from holdall.runtime.states.updating.updater import Order

Submit = Callable[[Callable[[], Any]], Future[Any]]


class WeightsFirst:
    """Chooses the units, as many as the host can finish before the next step. `is_on`: the plan has memory for it."""

    def __init__(self, beside: OutOfPlaceUpdate, pending: Pending, submit: Submit, *, is_on: bool) -> None:
        self._beside = beside
        self._pending = pending
        self._submit = submit
        self._is_on = is_on
        self._most = 1 << 30  # limit for this step; lowered if the host was late in the previous one
        self._taken = 0
        self._rests: list[tuple[PlacedUnit, Callable[[], None]]] = []

    def begin_step(self) -> None:
        late = self._pending.count_late()
        self._most = max(0, self._taken - late) if late else self._most + 1
        self._taken = 0

    def take(self, held: GradEntry, order: Order) -> Callable[[], Any] | None:
        """The function that computes the unit's weights; None: make its update in one piece."""
        unit = held.unit
        if not self._is_on or self._taken >= self._most or held.sum is not None or not self._beside.can_be_first(unit, order):
            return None
        self._taken += 1
        grads: list[torch.Tensor] = []

        def first() -> Any:
            found = held.on_host()
            event = self._beside.weights_first(unit, order, found)
            grads.extend(found)
            return event

        def rest() -> None:
            if grads:  # empty: the first part failed and has raised
                self._beside.catch_up(unit, order, grads)

        self._rests.append((unit, rest))
        return first

    def end_step(self) -> None:
        """All weights are submitted: now submit the rest of the updates."""
        for unit, rest in self._rests:
            self._pending.add_rest(unit, self._submit(rest))
        self._rests = []
