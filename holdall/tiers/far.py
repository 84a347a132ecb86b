"""The memory beyond, for a machine that computes on its CPU: other bytes of the same RAM, out of PyTorch's sight.

It gives the CPU what a host gives a GPU, a place that tensors leave to, so that every plan can be run, and its peaks counted,
where there is no accelerator. Copies are synchronous: the processor that would compute is the one that copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from holdall.tiers import Ticket
from holdall.tiers._base import Blocking, InHostMemory
from holdall.tiers._buffers import Buffers, bytes_of, copy_bytes, copy_tensor
from holdall.tiers._chaos import Line, current


class Far(Blocking, InHostMemory):
    name: ClassVar[str] = "far"
    serves: ClassVar[frozenset[str]] = frozenset({"cpu"})
    _buffers: Buffers

    def __init__(self, *, capacity: int | None = None, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.notes: list[str] = []
        self._buffers = Buffers(self.name, capacity)
        self._out, self._in = Line(), Line()  # copies that chaos puts off

    def put_all(self, sources: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        tickets = [Ticket(source.nbytes()) for source in sources]
        leaving = [(ticket, source) for ticket, source in zip(tickets, sources, strict=True) if ticket.nbytes]
        buffers = self._buffers.take_all([ticket.nbytes for ticket, _ in leaving])
        chaos = current()
        self._buffers.sent += sum(ticket.nbytes for ticket, _ in leaving)
        for (ticket, source), buffer in zip(leaving, buffers, strict=True):
            ticket.buffer = buffer
            if chaos is None:
                copy_bytes(buffer.storage, source)
            else:
                ticket.source = source
                ticket.out = chaos.copy(bytes_of(buffer.storage), bytes_of(source), self._out)
        return tickets

    def get(self, ticket: Ticket, device: torch.device | str) -> torch.UntypedStorage:
        assert ticket.is_live, "this ticket was freed"
        target = torch.UntypedStorage(ticket.nbytes, device=device)
        chaos = current()
        if ticket.nbytes and chaos is None:
            self.arrived(ticket)
            self._buffers.fetched += ticket.nbytes
            copy_bytes(target, ticket.buffer.storage)
        elif ticket.nbytes:
            ticket.target = target
            self.pull(ticket, bytes_of(target))
        return target

    def free(self, ticket: Ticket) -> None:
        assert ticket.is_live, "this ticket was freed already"
        ticket.is_live = False
        self.wait(ticket)
        self.wait_in(ticket)
        if ticket.buffer is not None:
            self._buffers.give(ticket.buffer)
            ticket.buffer = None

    def push(self, ticket: Ticket, source: torch.Tensor, *, after: Any = None) -> None:
        chaos = current()
        if after is not None:
            after.wait()
        self._buffers.sent += min(ticket.nbytes, source.nbytes)
        if chaos is None:
            copy_tensor(self.memory(ticket), source)
            return
        chaos.pause(0.1)
        self.arrived(ticket)  # an earlier one
        self.wait_in(ticket)  # whoever still reads what is there
        ticket.source = source.untyped_storage()
        ticket.out = chaos.copy(self.memory(ticket), source, self._out)

    def pull(self, ticket: Ticket, target: torch.Tensor, *, after: Any = None) -> Any:
        chaos = current()
        if after is not None:
            after.wait()
        self._buffers.fetched += min(ticket.nbytes, target.nbytes)
        if chaos is None and ticket.out is None:
            copy_tensor(target, self.memory(ticket))
            return None
        self.arrived(ticket)
        self.wait_in(ticket)
        if chaos is None:
            copy_tensor(target, self.memory(ticket))
            return None
        chaos.pause(0.1)
        ticket.back = chaos.copy(target, self.memory(ticket), self._in)
        return ticket.back

    def lane(self) -> Far:
        """Shares the buffers; goes with the store it was made from."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._out, other._in = Line(), Line()
        return other

    def close(self) -> None:
        self._buffers.clear()
