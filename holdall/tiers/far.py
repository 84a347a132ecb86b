"""The memory beyond, for a machine that computes on its CPU: other bytes of the same RAM, out of PyTorch's sight.

It gives the CPU what a host gives a GPU, a place that tensors leave to, so that every plan can be run, and its peaks counted,
where there is no accelerator. Copies are synchronous: the processor that would compute is the one that copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from holdall.tiers import Ticket
from holdall.tiers._buffers import Buffers, Counted, bytes_of, copy_bytes, copy_tensor


class Far(Counted):
    name: ClassVar[str] = "far"

    def __init__(self, *, capacity: int | None = None, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.notes: list[str] = []
        self._buffers = Buffers(self.name, capacity)

    def put(self, source: torch.UntypedStorage) -> Ticket:
        return self.put_all([source])[0]

    def put_all(self, sources: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        tickets = [Ticket(source.nbytes()) for source in sources]
        leaving = [(ticket, source) for ticket, source in zip(tickets, sources, strict=True) if ticket.nbytes]
        buffers = self._buffers.take_all([ticket.nbytes for ticket, _ in leaving])
        for (ticket, source), buffer in zip(leaving, buffers, strict=True):
            copy_bytes(buffer.storage, source)
            ticket.buffer = buffer
        return tickets

    def landed(self, ticket: Ticket) -> bool:  # noqa: ARG002 - the copy is over when `put` returns
        return True

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def get(self, ticket: Ticket, device: torch.device | str) -> torch.UntypedStorage:
        assert ticket.is_live, "this ticket was freed"
        target = torch.UntypedStorage(ticket.nbytes, device=device)
        if ticket.nbytes:
            copy_bytes(target, ticket.buffer.storage)
        return target

    def get_all(self, tickets: Sequence[Ticket], device: torch.device | str) -> list[torch.UntypedStorage]:
        return [self.get(ticket, device) for ticket in tickets]

    def wait_in(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def free(self, ticket: Ticket) -> None:
        assert ticket.is_live, "this ticket was freed already"
        ticket.is_live = False
        if ticket.buffer is not None:
            self._buffers.give(ticket.buffer)
            ticket.buffer = None

    def reserve(self, nbytes: int, *, pinned: bool = True) -> Ticket:  # noqa: ARG002 - there is no device to pin it for
        ticket = Ticket(nbytes)
        if nbytes:
            ticket.buffer = self._buffers.take(nbytes)
        return ticket

    def memory(self, ticket: Ticket) -> torch.Tensor:
        return bytes_of(ticket.buffer.storage)

    def push(self, ticket: Ticket, source: torch.Tensor, *, after: Any = None) -> None:  # noqa: ARG002
        copy_tensor(self.memory(ticket), source)

    def arrived(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def pull(self, ticket: Ticket, target: torch.Tensor, *, after: Any = None) -> None:  # noqa: ARG002
        copy_tensor(target, self.memory(ticket))

    def lane(self) -> Far:
        return self

    def close(self) -> None:
        self._buffers.clear()
