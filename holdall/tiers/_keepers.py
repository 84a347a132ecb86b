"""The stores that model states live in, as one: a ticket is of the tier that it was reserved in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from holdall.errors import Unsupported
from holdall.tiers import Keeper, Store, Ticket


class Keepers:
    """`near`: the tier that is meant where none is named. The calls are those of `Keeper`."""

    def __init__(self, stores: Mapping[str, Store], near: str) -> None:
        self._stores = stores
        self._near = near

    def _at(self, tier: str) -> Keeper:
        name = tier or self._near
        store = self._stores.get(name)
        if store is None or not hasattr(store, "memory"):
            raise Unsupported(f"the tier `{name}` cannot hold model states", hint="make the plan again with `holdall.plan`")
        return cast("Keeper", store)

    def reserve(self, nbytes: int, *, pinned: bool = True, tier: str = "") -> Ticket:
        ticket = self._at(tier).reserve(nbytes, pinned=pinned)
        ticket.tier = tier
        return ticket

    def memory(self, ticket: Ticket) -> torch.Tensor:
        return self._at(ticket.tier).memory(ticket)

    def push(self, ticket: Ticket, source: torch.Tensor, *, after: Any = None) -> None:
        self._at(ticket.tier).push(ticket, source, after=after)

    def arrived(self, ticket: Ticket) -> None:
        self._at(ticket.tier).arrived(ticket)

    def pull(self, ticket: Ticket, target: torch.Tensor, *, after: Any = None) -> Any:
        return self._at(ticket.tier).pull(ticket, target, after=after)

    def load(self, ticket: Ticket, begin: int, target: torch.Tensor, *, after: Sequence[Any] = ()) -> Any:
        return self._at(ticket.tier).load(ticket, begin, target, after=after)

    def save(self, ticket: Ticket, begin: int, source: torch.Tensor) -> Any:
        return self._at(ticket.tier).save(ticket, begin, source)

    def wait(self, ticket: Ticket) -> None:
        self._at(ticket.tier).wait(ticket)

    def free(self, ticket: Ticket) -> None:
        self._at(ticket.tier).free(ticket)

    def can_leave(self, ticket: Ticket) -> bool:
        """Is its memory a file's, which tensors can be made of without taking the host's?"""
        return hasattr(self._at(ticket.tier), "leave")

    def leave(self, ticket: Ticket) -> None:
        """Let go of bytes that tensors are still made of."""
        cast("Any", self._at(ticket.tier)).leave(ticket)

    def trim(self) -> None:
        """Let go of memory that is kept for others of its size."""
        for store in self._stores.values():
            if hasattr(store, "trim"):
                store.trim()

    def lane(self) -> Keepers:
        """Each by copy streams of its own."""
        lanes = {
            name: cast("Keeper", store).lane() if hasattr(store, "lane") else store for name, store in self._stores.items()
        }
        return Keepers(lanes, self._near)
