"""The gradients of a unit between backward and its update."""

from __future__ import annotations

from typing import Any

import torch

from holdall.runtime.states.unit import Layout, PlacedUnit
from holdall.runtime.states.update_out_of_place import SpeculativeUpdate
from holdall.tiers import Ticket
from holdall.tiers._keepers import Keepers


class GradEntry:
    """On the device, on their way to the host, or there; and what is known of them."""

    def __init__(self, unit: PlacedUnit, store: Keepers | None) -> None:
        self.unit = unit
        self.store = store
        self.which: tuple[int, ...] = ()
        self.here: list[torch.Tensor] = []  # on the device, those of `which`
        self.norms: torch.Tensor | None = None  # of `which`, on the device
        self.sum: Ticket | None = None  # on the host, where more than one backward was added up
        self.flat: torch.Tensor | None = None  # on the device, while it is being copied out
        self.attempt: SpeculativeUpdate | None = None  # its update, if one was begun ahead
        self.host_norms: torch.Tensor | None = None  # the same on the host, valid after `norms_event`
        self._each: tuple[torch.Tensor | None, tuple[torch.Tensor, ...]] = (None, ())  # the norms, and they one by one
        self.norms_event: Any = None

    @property
    def layout(self) -> Layout:
        """Of the gradient on the host."""
        return self.unit.grads if self.sum is None else self.unit.wide

    @property
    def ticket(self) -> Ticket:
        ticket = self.sum if self.sum is not None else self.unit.buffer
        assert ticket is not None
        return ticket

    def on_host(self) -> list[torch.Tensor]:
        """The gradients of `which` in the host's memory, when they are there."""
        assert self.store is not None
        self.store.arrived(self.ticket)
        views = self.layout.views(self.store.memory(self.ticket))
        return [views[n] for n in self.which]

    # what `Gradient` asks

    def norm(self, index: int) -> torch.Tensor | None:
        if self.sum is None:
            return self.known_norm(index)
        found: torch.Tensor = torch.linalg.vector_norm(self.on_host()[self.which.index(index)])
        return found

    def known_norm(self, index: int) -> torch.Tensor | None:
        if self.sum is not None or self.norms is None:
            return None
        if self._each[0] is not self.norms:
            self._each = self.norms, self._norms_on(self.unit.trained[index].home.device).unbind()
        return self._each[1][self.which.index(index)]

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
        home = self.unit.trained[index].home
        found = self.here[at] if self.here else self.on_host()[at]
        return found.detach().to(device=home.device, dtype=home.dtype, copy=True)
