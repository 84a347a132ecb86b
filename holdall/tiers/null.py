"""A memory that keeps nothing: it counts, and returns storages with whatever is in them.

For runs on fake tensors, where there are no bytes to keep, and for measuring what a plan costs apart from its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from holdall.errors import OverBudget
from holdall.tiers import Ticket
from holdall.units import format_bytes


class Null:
    name: ClassVar[str] = "null"
    serves: ClassVar[frozenset[str]] = frozenset()  # not for training

    def __init__(self, *, capacity: int | None = None, device: torch.device | str = "meta") -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self.notes: list[str] = []
        self.used = 0
        self.peak = 0
        self.sent = self.fetched = 0  # as if bytes were copied

    @property
    def held(self) -> int:
        return 0

    def put(self, source: torch.UntypedStorage) -> Ticket:
        return self.put_all([source])[0]

    def put_all(self, sources: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        tickets = [Ticket(source.nbytes()) for source in sources]
        size = sum(ticket.nbytes for ticket in tickets)
        if self.capacity is not None and self.used + size > self.capacity:
            raise OverBudget(
                f"the memory `null` holds {format_bytes(self.used)} and cannot take {format_bytes(size)} more: "
                f"its capacity is {format_bytes(self.capacity)}",
                hint="give it a larger budget, or let less leave for it",
            )
        self.used += size
        self.sent += size
        self.peak = max(self.peak, self.used)
        return tickets

    def landed(self, ticket: Ticket) -> bool:  # noqa: ARG002 - nothing is copied
        return True

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def get(self, ticket: Ticket, device: torch.device | str) -> torch.UntypedStorage:
        assert ticket.is_live, "this ticket was freed"
        self.fetched += ticket.nbytes
        return torch.UntypedStorage(ticket.nbytes, device=device)

    def get_all(self, tickets: Sequence[Ticket], device: torch.device | str) -> list[torch.UntypedStorage]:
        return [self.get(ticket, device) for ticket in tickets]

    def wait_in(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def free(self, ticket: Ticket) -> None:
        assert ticket.is_live, "this ticket was freed already"
        ticket.is_live = False
        self.used = max(0, self.used - ticket.nbytes)  # 0 since `close`

    def close(self) -> None:
        self.used = 0
