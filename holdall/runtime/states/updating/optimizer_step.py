"""Replaces `optimizer.step()`: makes every unit's update when and where the plan says.

The user's optimizer does nothing for placed parameters: they are removed from its groups while its step runs. Their updates
are made before that: at once ("step"), overlapping the next forward ("overlap_forward"), or already when the gradients arrived
("backward"). `updater.py` and `via_device.py` make an update; `pending.py` waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.gradients.collector import Collector, is_spent, spend
from holdall.runtime.states.gradients.entry import GradEntry
from holdall.runtime.states.gradients.scaler import unscale
from holdall.runtime.states.torn import tearing
from holdall.runtime.states.unit import DEVICE, VIA_DEVICE, PlacedUnit
from holdall.runtime.states.updating.in_stretches import InStretches
from holdall.runtime.states.updating.out_of_place import OutOfPlaceUpdate
from holdall.runtime.states.updating.pending import Pending
from holdall.runtime.states.updating.speculative import Ahead
from holdall.runtime.states.updating.updater import Order, Updater
from holdall.runtime.states.updating.via_device import UpdateViaDevice
from holdall.runtime.states.updating.weights_first import WeightsFirst
from holdall.tiers._chaos import current
from holdall.updates.parts import Groups, snapshot

BACKWARD, OVERLAP_FORWARD, STEP = "backward", "overlap_forward", "step"


class Stepping:
    """`slots`: the most units that are updated via the device at the same time."""

    def __init__(
        self,
        units: Sequence[PlacedUnit],
        updater: Updater,
        passing: UpdateViaDevice,
        collector: Collector,
        pending: Pending,
        beside: OutOfPlaceUpdate,
        ahead: Ahead,
        stretched: InStretches,
        *,
        when: str,
        slots: int,
        weights_first: bool,
    ) -> None:
        self._units = units
        self._updater = updater
        self._passing = passing
        self._collector = collector
        self._pending = pending
        self._beside = beside
        self._ahead = ahead
        self._stretched = stretched
        self._weights_first = WeightsFirst(beside, pending, updater.submit, is_on=weights_first)
        self._device = updater.device
        self._when = when
        self._slots = slots
        self.reads_masters = False  # gradients arrived at the masters themselves, so a forward reads these
        self._aside: list[list[torch.Tensor]] = []  # the optimizer's groups, while its own step runs

    # around the optimizer's own step

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the updates and leave the other parameters to the optimizer."""
        groups = snapshot(optimizer)
        is_skipped = unscale(optimizer, self._units, are_used_up=self._when == BACKWARD)
        if not is_skipped:
            self._update_all(groups)
        self._aside = [group["params"] for group in optimizer.param_groups]
        placed = {id(m.master) for u in self._units for m in u.trained if u.needs_working}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in placed]

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back, and guard those whose update is running."""
        for group, params in zip(optimizer.param_groups, self._aside, strict=True):
            group["params"] = params
        self._pending.raise_guard(optimizer)

    def _update_all(self, groups: Groups) -> None:
        held = self._collector.take()
        scales = {name: self._collector.asked(h) for name, h in held.items()}
        for unit in self._units:
            if unit.name in held or not unit.needs_working:
                continue
            if self._when != BACKWARD and is_spent(unit):
                raise Unsupported(
                    f"`optimizer.step()` was called twice after one backward: the first used the gradient of `{unit.name}`",
                    hint="call `optimizer.step()` once per backward, and `optimizer.zero_grad()` in between",
                )
            given = self._collector.given(unit)
            if given is not None:
                held[unit.name] = given
                self.reads_masters |= any(m.is_swapped and type(m.master.grad) is torch.Tensor for m in unit.trained)
        self._ahead.begin_step()
        self._weights_first.begin_step()
        self._prepare_room(held.values())
        chaos = current()
        order = sorted(self._units, key=lambda unit: unit.update == DEVICE)  # the host works while this thread launches kernels
        due = [unit for unit in (order if chaos is None else chaos.shuffled(self._units)) if unit.name in held]
        self._stretched.expect(unit for unit in due if held[unit.name].which)
        for unit in due:
            self.update(held[unit.name], groups, scales.get(unit.name))
            spend(held[unit.name])
        if self._when != BACKWARD:
            self._ahead.end_step()
        self._weights_first.end_step()
        self._updater.end_step()

    # one update

    def update(self, held: GradEntry, groups: Groups, scale: torch.Tensor | None) -> None:
        """Make the update, or submit it."""
        unit = held.unit
        if not held.which:
            return
        with tearing(unit):
            self._update(held, groups, scale)

    def _update(self, held: GradEntry, groups: Groups, scale: torch.Tensor | None) -> None:
        unit, updater = held.unit, self._updater
        unit.begin_update(held.which)
        after = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        order = Order(groups, held.which, scale, after)
        unit.updated = held.which
        if unit.update == DEVICE:
            updater.on_device(unit, order, held.here)
            held.here = []
            unit.note_update()
            unit.end_update()
        elif unit.update == VIA_DEVICE:
            self._passing.adopt(unit)
            self._pass_through(held, order)
        else:
            is_right = self._ahead.judge(held, order)
            first = self._weights_first.take(held, order) if not is_right else None
            job = first or partial(self._on_host, held, order, is_right)
            is_first = not all(updater.states([unit.trained[n] for n in held.which]))
            # a first step creates the states, which the loop may read
            is_now = self._when == STEP or (is_first and self._when == OVERLAP_FORWARD)
            running = None if is_now else updater.submit(job)
            self._pending.add(unit, job() if is_now else running)
            if unit.is_away:
                self._pending.add_rest(unit, self._stretched.saving(unit, running))
            if is_now:
                self._pending.finish(unit)

    def _on_host(self, held: GradEntry, order: Order, is_right: bool) -> Any:
        if held.attempt is not None and is_right:
            return self._beside.accept(held.unit, held.attempt, order)
        grads = held.on_host()
        make = self._stretched.update if held.unit.is_away else self._updater.on_host
        event = make(held.unit, order, grads)
        chaos = current()
        if chaos is not None and (held.sum is not None or not held.unit.returns_in_buffer):
            chaos.poison(*grads)  # consumed
        self._free_sum(held)
        return event

    def _prepare_room(self, held: Iterable[GradEntry]) -> None:
        """Allocate device memory for updates via the device, until all are done."""
        those = [h for h in held if h.unit.update == VIA_DEVICE]
        for h in those:
            self._passing.adopt(h.unit)
        if those and self._device.type == "cuda":
            most = max(self._passing.through_bytes(h.unit, h.layout) for h in those)
            self._passing.room(most, min(self._slots, len(those)))

    def _pass_through(self, held: GradEntry, order: Order) -> None:
        inline = self._device.type != "cuda"
        is_alone = inline or self._when == BACKWARD  # a slot for this unit alone; at a step, several units share slots
        if is_alone:
            self._passing.room(self._passing.through_bytes(held.unit, held.layout), 1)
        self._pending.add(held.unit, self._passing.update(held.unit, order, held.ticket, held.layout))
        if is_alone:
            self._passing.leave_room()
        if inline:
            self._pending.finish(held.unit)
        self._free_sum(held)

    def _free_sum(self, held: GradEntry) -> None:
        if held.sum is not None:
            assert self._updater.store is not None
            self._updater.store.free(held.sum)
            held.sum = None
