"""The gradients of a unit between backward and its update."""

from __future__ import annotations

from typing import Any

import torch

from holdall.runtime.states.packing import Layout
from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.updating.out_of_place import SpeculativeUpdate
from holdall.tiers import Ticket
from holdall.tiers._keepers import Keepers


class GradEntry:
    """Gradients on the device, being copied to the host, or there; with their norms."""

    def __init__(self, unit: PlacedUnit, store: Keepers | None) -> None:
        self.unit = unit
        self.store = store
        self.which: tuple[int, ...] = ()
        self.here: list[torch.Tensor] = []  # on the device, for the members `which`
        self.norms: torch.Tensor | None = None  # norms of `which`, on the device
        self.sum: Ticket | None = None  # on the host, if several backwards were summed
        self.flat: torch.Tensor | None = None  # on the device, while it is copied out
        self.attempt: SpeculativeUpdate | None = None  # its speculative update, if one was begun
        self.host_norms: torch.Tensor | None = None  # the norms on the host, valid after `norms_event`
        self._each: dict[str, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}  # by device: the norms, and a view of each
        self.norms_event: Any = None

    @property
    def layout(self) -> Layout:
        """Layout of the gradient on the host."""
        return self.unit.grads if self.sum is None else self.unit.wide

    @property
    def ticket(self) -> Ticket:
        ticket = self.sum if self.sum is not None else self.unit.buffer
        assert ticket is not None
        return ticket

    def on_host(self) -> list[torch.Tensor]:
        """The gradients of `which` in host memory; waits for them."""
        assert self.store is not None
        self.store.arrived(self.ticket)
        views = self.layout.views(self.store.memory(self.ticket))
        return [views[n] for n in self.which]

    # called by `Gradient`

    def norm(self, index: int) -> torch.Tensor | None:
        if self.sum is None:
            return self.known_norm(index)
        found: torch.Tensor = torch.linalg.vector_norm(self.on_host()[self.which.index(index)])
        return found

    def known_norm(self, index: int, device: torch.device | None = None) -> torch.Tensor | None:
        if self.sum is not None or self.norms is None:
            return None
        where = self.unit.trained[index].master.device if device is None else device
        norms, views = self._each.get(where.type, (None, ()))
        if norms is not self.norms:
            views = self._norms_on(where).unbind()
            self._each[where.type] = self.norms, views
        return views[self.which.index(index)]

    def forget_norms(self) -> None:
        """Free the norms, which nobody may read after the step: an update beside the loop holds this entry for longer."""
        self.norms = self.host_norms = self.norms_event = None
        self._each.clear()

    def _norms_on(self, device: torch.device) -> torch.Tensor:
        assert self.norms is not None
        if device.type == self.norms.device.type:
            return self.norms
        if self.norms_event is not None:
            self.norms_event.synchronize()
            self.norms_event = None
        if self.host_norms is None:
            self.host_norms = self.norms.to(device)
        return self.host_norms

    def bring(self, index: int) -> torch.Tensor:
        at = self.which.index(index)
        master = self.unit.trained[index].master
        found = self.here[at] if self.here else self.on_host()[at]
        return found.detach().to(device=master.device, dtype=master.dtype, copy=True)
