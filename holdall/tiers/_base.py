"""What stores have in common: counts, copies of a single storage, waits that block the host, memory that the host reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from holdall.tiers import Ticket
from holdall.tiers._buffers import Buffers, bytes_of, copy_tensor


class Rooms(Protocol):
    """Who gives a store the room that its bytes lie in, and counts it: buffers in memory, extents of a file."""

    used: int
    peak: int
    sent: int
    fetched: int
    saved: int
    loaded: int

    @property
    def held(self) -> int: ...

    def take_all(self, sizes: Sequence[int]) -> list[Any]: ...

    def give(self, room: Any, /) -> None: ...

    def begin_anew(self) -> None: ...

    def clear(self) -> None: ...


class BaseStore:
    """Its counts are those of its rooms."""

    _buffers: Rooms

    @property
    def used(self) -> int:
        return self._buffers.used

    @property
    def peak(self) -> int:
        return self._buffers.peak

    @property
    def held(self) -> int:
        return self._buffers.held

    @property
    def sent(self) -> int:
        return self._buffers.sent

    @property
    def fetched(self) -> int:
        return self._buffers.fetched

    @property
    def saved(self) -> int:
        return self._buffers.saved

    @property
    def loaded(self) -> int:
        return self._buffers.loaded

    def begin_anew(self) -> None:
        self._buffers.begin_anew()

    def put(self, source: torch.UntypedStorage) -> Ticket:
        return self.put_all([source])[0]

    def put_all(self, sources: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        raise NotImplementedError

    def landed(self, ticket: Ticket) -> bool:
        if ticket.out is not None and not ticket.out.query():
            return False
        ticket.source = None
        return True

    def arrived(self, ticket: Ticket) -> None:
        raise NotImplementedError


class Blocking(BaseStore):
    """Its waits block the host, because threads make the copies."""

    def arrived(self, ticket: Ticket) -> None:
        if ticket.out is not None:
            ticket.out.wait()
            ticket.out = None

    def wait(self, ticket: Ticket) -> None:
        self.arrived(ticket)
        ticket.source = None

    def wait_in(self, ticket: Ticket) -> None:
        if ticket.back is not None:
            ticket.back.wait()
            ticket.back = None
        ticket.target = None

    def get(self, ticket: Ticket, device: torch.device | str) -> torch.UntypedStorage:
        raise NotImplementedError

    def get_all(self, tickets: Sequence[Ticket], device: torch.device | str) -> list[torch.UntypedStorage]:
        return [self.get(ticket, device) for ticket in tickets]

    def reserve(self, nbytes: int, *, pinned: bool = True) -> Ticket:  # noqa: ARG002 - only staging buffers are
        ticket = Ticket(nbytes)
        if nbytes:
            (ticket.buffer,) = self._buffers.take_all([nbytes])
        return ticket


class InHostMemory(BaseStore):
    """Its bytes lie in memory that the host's processors reach."""

    _buffers: Buffers

    def trim(self) -> None:
        """Let go of memory that is kept for others of its size."""
        self._buffers.trim(0)

    def memory(self, ticket: Ticket) -> torch.Tensor:
        return bytes_of(ticket.buffer.storage)

    def load(self, ticket: Ticket, begin: int, target: torch.Tensor, *, after: Sequence[Any] = ()) -> Any:
        for copy in after:
            copy.wait()
        self.arrived(ticket)
        self._buffers.loaded += target.nbytes
        copy_tensor(target, self.memory(ticket)[begin : begin + target.nbytes])

    def save(self, ticket: Ticket, begin: int, source: torch.Tensor) -> Any:
        self.arrived(ticket)
        self._buffers.saved += source.nbytes
        copy_tensor(self.memory(ticket)[begin : begin + source.nbytes], source)
