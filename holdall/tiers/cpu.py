"""The host's memory as seen from a GPU: pinned buffers of exact size, one stream out, one stream in.

What waits for what, and why no memory is reused too early (the compute stream is the one that is current when a call is made):

    put      compute: writes source ----+                              the source is referenced by the ticket until `wait`,
             out:                       +-- copy to buffer -- OUT      so the allocator cannot hand its memory on
    wait     compute: ................................ waits OUT       from here the source's memory is compute's again
    get      compute: takes target -----+                              memory of the compute stream's own pool, whose former
             in:      waits OUT         +-- copy to target -- BACK     user on that stream is over before the copy begins
    wait_in  compute: ................................ waits BACK      the target is referenced by the ticket until here
    free     the buffer remembers BACK (or OUT); the next copy into it, on the out stream, waits for that

So `record_stream` is never needed: it frees late, and drove reserved memory to its cap when it was tried. Every wait is between
streams; the host goes on, except in `close` and where a kept buffer must make room.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch

from holdall.errors import Unsupported
from holdall.tiers import Ticket
from holdall.tiers._base import InHostMemory
from holdall.tiers._buffers import Buffers, be_idle, bytes_of
from holdall.tiers._chaos import current
from holdall.tiers._pinning import pin, unpin
from holdall.units import MiB

_PIECE = 64 * MiB


class Cpu(InHostMemory):
    name: ClassVar[str] = "cpu"
    serves: ClassVar[frozenset[str]] = frozenset({"cuda"})
    _buffers: Buffers

    def __init__(self, *, capacity: int | None = None, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise Unsupported(
                "the memory `cpu` serves a CUDA device, and there is none", hint="use `far` to compute on the CPU"
            )
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.notes: list[str] = []
        self._out = torch.cuda.Stream(self.device)
        self._in = torch.cuda.Stream(self.device)
        self._awaited: tuple[torch.cuda.Event, torch.cuda.Stream] | None = None  # what was waited for last, and by whom
        self._buffers = Buffers(self.name, capacity, prepare=partial(pin, self.notes), dispose=unpin)
        # Pinned memory must be unpinned before it is unmapped, also when nobody calls `close`; at exit the system does both.
        shut = weakref.finalize(self, _shut, self.device, self._buffers)
        shut.atexit = False
        self._shut: Callable[[], object] = shut

    def put_all(self, sources: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        tickets = [Ticket(source.nbytes()) for source in sources]
        leaving = [(ticket, source) for ticket, source in zip(tickets, sources, strict=True) if ticket.nbytes]
        if not leaving:
            return tickets
        buffers = self._buffers.take_all([ticket.nbytes for ticket, _ in leaving])
        self._buffers.sent += sum(ticket.nbytes for ticket, _ in leaving)
        self._out.wait_stream(self._compute())
        for event in {id(b.busy): b.busy for b in buffers if b.busy is not None}.values():
            self._out.wait_event(event)
        chaos = current()
        pairs = list(zip((source for _, source in leaving), buffers, strict=True))
        with torch.cuda.stream(self._out), torch._C._DisableTorchDispatch():
            for source, buffer in pairs if chaos is None else chaos.shuffled(pairs):
                if chaos is not None:
                    chaos.pause_stream()
                buffer.storage.copy_(source, non_blocking=True)
        out = self._out.record_event()
        for (ticket, source), buffer in zip(leaving, buffers, strict=True):
            buffer.busy = None
            ticket.buffer, ticket.source, ticket.out = buffer, source, out
        return tickets

    def wait(self, ticket: Ticket) -> None:
        if ticket.source is not None:
            self._let_wait(ticket.out)
            ticket.source = None

    def get(self, ticket: Ticket, device: torch.device | str) -> torch.UntypedStorage:
        return self.get_all([ticket], device)[0]

    def get_all(self, tickets: Sequence[Ticket], device: torch.device | str) -> list[torch.UntypedStorage]:
        assert all(ticket.is_live for ticket in tickets), "this ticket was freed"
        for ticket in tickets:
            self.wait_in(ticket)  # an earlier fetch of the same bytes
        targets = [torch.UntypedStorage(ticket.nbytes, device=device) for ticket in tickets]
        coming = [(ticket, target) for ticket, target in zip(tickets, targets, strict=True) if ticket.nbytes]
        if not coming:
            return targets
        self._buffers.fetched += sum(ticket.nbytes for ticket, _ in coming)
        self._in.wait_stream(self._compute())
        for event in {id(ticket.out): ticket.out for ticket, _ in coming}.values():
            self._in.wait_event(event)
        chaos = current()
        with torch.cuda.stream(self._in), torch._C._DisableTorchDispatch():
            for ticket, target in coming if chaos is None else chaos.shuffled(coming):
                if chaos is not None:
                    chaos.poison(bytes_of(target))
                    chaos.pause_stream()
                target.copy_(ticket.buffer.storage, non_blocking=True)
        back = self._in.record_event()
        for ticket, target in coming:
            ticket.back, ticket.target = back, target
        return targets

    def wait_in(self, ticket: Ticket) -> None:
        if ticket.target is not None:
            self._let_wait(ticket.back)
            ticket.target = None

    def _let_wait(self, event: torch.cuda.Event) -> None:
        """The compute stream waits; what went together has one event, which is waited for once."""
        stream = self._compute()
        if self._awaited is None or self._awaited[0] is not event or self._awaited[1] != stream:
            stream.wait_event(event)
            self._awaited = event, stream

    def free(self, ticket: Ticket) -> None:
        assert ticket.is_live, "this ticket was freed already"
        ticket.is_live = False
        self.wait(ticket)
        self.wait_in(ticket)
        if ticket.buffer is not None:
            ticket.buffer.busy = ticket.out if ticket.back is None else ticket.back
            self._buffers.give(ticket.buffer)
            ticket.buffer = None

    def reserve(self, nbytes: int, *, pinned: bool = True) -> Ticket:
        ticket = Ticket(nbytes)
        if nbytes:
            ticket.buffer = self._buffers.take(nbytes, prepare=pinned)
            be_idle(ticket.buffer)  # the host may write into it at once
        return ticket

    def push(self, ticket: Ticket, source: torch.Tensor, *, after: torch.cuda.Event | None = None) -> None:
        self.wait(ticket)  # of an earlier push
        self._out.wait_event(after or self._compute().record_event())
        if ticket.back is not None:
            self._out.wait_event(ticket.back)  # whoever still reads what is there
        self._buffers.sent += min(ticket.nbytes, source.nbytes)
        with torch.cuda.stream(self._out):
            _in_pieces(self.memory(ticket), source, poison=False)
        ticket.out = self._out.record_event()
        ticket.source = source.untyped_storage()

    def arrived(self, ticket: Ticket) -> None:
        if ticket.out is not None:
            ticket.out.synchronize()

    def pull(self, ticket: Ticket, target: torch.Tensor, *, after: torch.cuda.Event | None = None) -> torch.cuda.Event:
        self._in.wait_event(after or self._compute().record_event())
        if ticket.out is not None:
            self._in.wait_event(ticket.out)
        self._buffers.fetched += min(ticket.nbytes, target.nbytes)
        with torch.cuda.stream(self._in):
            _in_pieces(target, self.memory(ticket), poison=True)
        done: torch.cuda.Event = self._in.record_event()
        ticket.back = done
        return done

    def lane(self) -> Cpu:
        """Shares the buffers, with two streams of its own; goes with the store it was made from."""
        other = object.__new__(Cpu)
        other.__dict__.update(self.__dict__)
        other._out, other._in = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        other._shut = _nothing
        return other

    def close(self) -> None:
        self._shut()

    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)


def _in_pieces(target: torch.Tensor, source: torch.Tensor, *, poison: bool) -> None:
    """One direction of the link serves copies as they were issued, whatever their streams: a long one holds up the rest."""
    size = min(target.numel(), source.numel())
    chaos = current()
    if chaos is not None:
        if poison:  # what is on the device is not valid before the copy
            chaos.poison(target[:size])
        chaos.pause_stream()
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        for begin in range(0, size, _PIECE):
            end = min(begin + _PIECE, size)
            target[begin:end].copy_(source[begin:end], non_blocking=True)


def _nothing() -> None:
    """A lane has nothing to shut."""


def _shut(device: torch.device, buffers: Buffers) -> None:
    torch.cuda.synchronize(device)
    buffers.clear()
