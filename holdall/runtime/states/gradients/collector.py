"""Stores the gradients of units from backward to their update: keeps, offloads, accumulates, and shows them to the loop.

A unit's gradients are a `GradEntry`; the loop sees them as a `Gradient` in each master's `.grad`. At the step, the store finds
out what the loop did to them: one factor for the whole unit, or replaced gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.gradients.entry import GradEntry
from holdall.runtime.states.gradients.offloaded import Gradient
from holdall.runtime.states.unit import DEVICE, PlacedUnit
from holdall.runtime.states.updating.speculative import Ahead, wait_for_attempt
from holdall.tiers._chaos import current
from holdall.tiers._keepers import Keepers


class Collector:
    """`are_used_up`: updates in backward consume the gradients. `overlap`: computation continues while they are copied out.
    `ahead`: may begin speculative updates as they arrive.
    """

    def __init__(
        self,
        store: Keepers | None,
        device: torch.device,
        *,
        are_used_up: bool,
        overlap: bool,
        ahead: Ahead | None,
        quiet: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.held: dict[str, GradEntry] = {}  # by unit, until the step takes them
        self._store = store
        self._device = device
        self._are_used_up = are_used_up
        self._overlap = overlap
        self._ahead = ahead
        self._quiet = quiet
        self._leaving: list[GradEntry] = []
        self._norms: torch.Tensor | None = None  # pinned

    # arriving

    def collect(self, unit: PlacedUnit, which: tuple[int, ...], grads: list[torch.Tensor]) -> GradEntry:
        """Store the gradients of a unit's trained members `which` where its update needs them."""
        if self._are_used_up and any(not _is_cleared(unit.trained[n].master.grad) for n in which):
            raise Unsupported(
                "a second backward ran before `zero_grad()`, but the first has already made the updates",
                hint="use fit(..., reads_gradients=True), or name the backwards per step, as in fit(..., accumulate=2)",
            )
        held = self.held.get(unit.name)
        if held is not None and _are_cleared(held):
            self._drop(held)  # the loop cleared its gradients instead of stepping
            held = None
        if held is None:
            held = self.held[unit.name] = GradEntry(unit, self._store)
            held.which = which
            self._hold(held, grads)
            if self._ahead is not None:
                self._ahead.begin(held)
        else:
            self._add(held, which, grads)
        return held

    def _hold(self, held: GradEntry, grads: list[torch.Tensor]) -> None:
        if not self._are_used_up:
            held.norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32 if held.unit.is_narrow else None))
        if held.unit.update == DEVICE:
            held.here = grads
        else:
            self._send(held, grads)

    def _send(self, held: GradEntry, grads: list[torch.Tensor]) -> None:
        """Flatten the gradients and start the copy to the host; first wait for the previous copy, so that only one
        is running."""
        assert self._store is not None
        self.let_go()
        unit = held.unit
        held.flat = torch.empty(unit.grads.nbytes, dtype=torch.uint8, device=self._device)
        chaos = current()
        if chaos is not None:
            chaos.poison(held.flat)
        views = unit.grads.views(held.flat)
        torch._foreach_copy_([views[n] for n in held.which], grads)
        grads.clear()
        assert unit.buffer is not None
        self._store.push(unit.buffer, held.flat)
        self._leaving.append(held)
        if not self._overlap:
            self.let_go()

    def let_go(self) -> None:
        """Wait for the copies to the host and free the device memory."""
        for held in self._leaving:
            assert self._store is not None and held.unit.buffer is not None
            self._store.wait(held.unit.buffer)
            held.flat = None
        self._leaving = []

    def _add(self, held: GradEntry, which: tuple[int, ...], grads: list[torch.Tensor]) -> None:
        """Accumulate another backward's gradients, in the masters' precision."""
        unit = held.unit
        if which != held.which:
            raise Unsupported(
                f"`{unit.name}` received gradients for other parameters than in the previous backward",
                hint='step after every backward, or keep model states on the device: fit(..., allow={"recompute", "offload"})',
            )
        grad_of = [unit.trained[n].master.grad for n in which]
        if any(not isinstance(g, Gradient) or g.here is not None or g.factor is not None for g in grad_of):
            raise Unsupported(
                f"the gradient of `{unit.name}` was changed between two backwards of one step",
                hint='change it after the last backward, or keep it on the device: fit(..., allow={"recompute", "offload"})',
            )
        held.norms = None
        if self._ahead is not None:
            self._ahead.give_up(held)
        if unit.update == DEVICE:
            masters = [unit.trained[n].master for n in which]
            held.here = [h.to(p.dtype) for h, p in zip(held.here, masters, strict=True)]
            torch._foreach_add_(held.here, [g.to(p.dtype) for g, p in zip(grads, masters, strict=True)])
            held.norms = torch.stack(torch._foreach_norm(held.here, 2))
            return
        if unit.source is unit.buffer and unit.is_streamed:
            raise Unsupported(
                "this plan reuses weight buffers for gradients, so it allows one backward per step",
                hint="name the backwards per step, as in fit(..., accumulate=2)",
            )
        assert self._store is not None and unit.buffer is not None
        layout = unit.wide
        with self._quiet():
            if held.sum is None:
                self._widen(held)
            self._send(held, grads)
            self._store.arrived(unit.buffer)
            assert held.sum is not None
            views = layout.views(self._store.memory(held.sum))
            new = unit.grads.views(self._store.memory(unit.buffer))
            for n in which:
                views[n].add_(new[n])

    def _widen(self, held: GradEntry) -> None:
        """Move the gradients out of their buffer, in the masters' precision."""
        assert self._store is not None
        layout = held.unit.wide
        with self._quiet():
            first = held.on_host()
            held.sum = self._store.reserve(layout.nbytes, pinned=False)
            views = layout.views(self._store.memory(held.sum))
            torch._foreach_copy_([views[n] for n in held.which], first)

    # the loop's view

    def send_norms(self) -> None:
        """Copy all norms to the host at once, so that clipping waits once."""
        known = [h for h in self.held.values() if h.norms is not None]
        if self._device.type != "cuda" or not known:
            return
        every = torch.cat([h.norms for h in known])  # type: ignore[misc]
        if self._norms is None or self._norms.numel() < every.numel():
            self._norms = torch.empty(every.numel(), dtype=every.dtype, pin_memory=True)
        host = self._norms[: every.numel()]
        host.copy_(every, non_blocking=True)
        event = torch.cuda.current_stream(self._device).record_event()
        for held, part in zip(known, host.split([len(h.which) for h in known]), strict=True):
            held.host_norms, held.norms_event = part, event

    def show(self) -> None:
        """After backward: give every master with a new gradient a `.grad`."""
        for held in self.held.values():
            for n in held.which:
                master = held.unit.trained[n].master
                grad = master.grad
                if _is_cleared(grad):
                    grad = None
                if grad is not None and not isinstance(grad, Gradient) and not self._are_used_up:
                    with torch.no_grad():
                        grad.add_(held.bring(n))  # a gradient of the loop's own, or of the master itself: accumulate
                    continue
                if grad is not None and (not isinstance(grad, Gradient) or grad.source is not held):
                    raise Unsupported(
                        "gradients of the previous step were not cleared, so this backward would add to them",
                        hint="call `optimizer.zero_grad()` after every step",
                    )
                if grad is None:
                    grad = master.grad = Gradient(master, held, n)
                assert isinstance(grad, Gradient)
                grad.renew()
                if self._are_used_up:
                    grad.spent = "its update was made in backward, because of `reads_gradients=False`"
        if self._are_used_up:
            self.held = {}

    # leaving

    def take(self) -> dict[str, GradEntry]:
        """Hand all entries over to the step."""
        held, self.held = self.held, {}
        return held

    def asked(self, held: GradEntry) -> torch.Tensor | None:
        """The factor that the loop applied, if all gradients have the same; otherwise replaces the entry's gradients and
        returns None.
        """
        grads = [held.unit.trained[n].master.grad for n in held.which]
        kept = [n for n, m in enumerate(held.unit.trained) if m.master.grad is not None]  # includes those that the loop set
        is_ours = all(isinstance(g, Gradient) and g.source is held and g.here is None for g in grads)
        if not is_ours or len(kept) != len(grads):
            self._replace(held, kept)
            return None
        factors = [g.factor for g in grads]  # type: ignore[union-attr]
        first: torch.Tensor | None = factors[0]
        if all(f is first for f in factors):
            return first
        self._replace(held, kept)
        return None

    def given(self, unit: PlacedUnit) -> GradEntry | None:
        """Gradients that the loop set itself, or zeroed, where no backward brought any."""
        kept = [n for n, m in enumerate(unit.trained) if m.master.grad is not None and not _is_gone(m.master.grad)]
        if not kept:
            return None
        held = GradEntry(unit, self._store)
        self._replace(held, kept)
        return held

    def _replace(self, held: GradEntry, kept: list[int]) -> None:
        """Replace the entry's gradients by those the loop left."""
        unit = held.unit
        values = {}
        for n in kept:
            grad = unit.trained[n].master.grad
            assert grad is not None
            values[n] = grad.value() if isinstance(grad, Gradient) else grad
        held.which = tuple(kept)
        held.norms = None
        if not kept:
            return
        if unit.update == DEVICE:
            held.here = [values[n].to(self._device) for n in kept]
            return
        assert self._store is not None
        layout = unit.wide
        if held.sum is None:
            held.sum = self._store.reserve(layout.nbytes, pinned=False)
        with self._quiet():
            views = layout.views(self._store.memory(held.sum))
            for n in kept:
                views[n].copy_(values[n])

    def make_way(self) -> None:
        """Restore streamed weights whose host buffer holds unused gradients: a forward needs them."""
        for held in list(self.held.values()):
            unit = held.unit
            shares = unit.buffer is not None and unit.source is unit.buffer  # otherwise weights have their own source
            if not unit.is_streamed or not shares or held.sum is not None:
                continue
            wait_for_attempt(held)  # it reads the memory to be overwritten
            if _are_cleared(held):
                self._drop(held)
            else:
                self._widen(held)
            unit.copy_from_homes(self._store)

    def forget(self) -> None:
        """Drop the gradients of a backward that will be repeated."""
        self.let_go()
        for held in list(self.held.values()):
            wait_for_attempt(held)  # it reads the memory that the repeated gradient is copied to
            self._drop(held)

    def _drop(self, held: GradEntry) -> None:
        if held.sum is not None and self._store is not None:
            self._store.free(held.sum)
        del self.held[held.unit.name]

    def unused(self, units: Iterable[PlacedUnit]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Gradients that no step has used, as plain tensors, for the time after the harness."""
        found = []
        for master in (m.master for u in units if u.needs_working for m in u.members):
            if master.grad is not None and not _is_gone(master.grad):
                found.append((master, master.grad.value() if isinstance(master.grad, Gradient) else master.grad))
        return found

    def close(self) -> None:
        self.held, self._ahead = {}, None


def spend(held: GradEntry) -> None:
    """Mark gradients as consumed; later reads raise."""
    for m in held.unit.trained:
        if isinstance(m.master.grad, Gradient):
            m.master.grad.spent = "`optimizer.step()` has used it"
            m.master.grad.here = None
    held.forget_norms()


def is_spent(unit: PlacedUnit) -> bool:
    """Has a step used the unit's gradient, and no new one arrived since?"""
    return any(isinstance(m.master.grad, Gradient) and bool(m.master.grad.spent) for m in unit.trained)


def _is_gone(grad: torch.Tensor) -> bool:
    return isinstance(grad, Gradient) and bool(grad.spent)


def _is_cleared(grad: torch.Tensor | None) -> bool:
    return grad is None or (isinstance(grad, Gradient) and grad.is_cleared)


def _are_cleared(held: GradEntry) -> bool:
    return all(_is_cleared(held.unit.trained[n].master.grad) for n in held.which)
