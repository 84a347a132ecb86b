"""A store whose copies are made by threads, piece by piece: for tiers that a GPU's copy engines do not reach.

    put, push   a thread copies a piece of the source into a staging buffer and writes it to the tier
    get, pull   a thread reads a piece from the tier into a staging buffer and copies it into the target

Staging buffers are page-aligned, and pinned where there is a GPU; host memory that the tier can take as it is passes by them.
Reads and writes have threads of their own, so neither queues behind the other. System calls and copies of bytes run without the
interpreter's lock.

What waits for what: a copy waits, in its thread, for earlier copies of the same ticket and for the stream that made the source
or owned the target. It never waits for a later one, and threads serve their queues in order, so they cannot wait in a circle.
The caller's waits block the host: a stream cannot wait for a copy that was not issued yet. An error in a thread is raised by
whoever waits for the copy.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from holdall.errors import HoldallError
from holdall.tiers import Ticket
from holdall.tiers._base import Blocking
from holdall.tiers._buffers import Buffer, Buffers, bytes_of
from holdall.tiers._chaos import current
from holdall.tiers._pinning import pin, unpin
from holdall.tiers._request_times import RequestTimes
from holdall.units import MiB

PIECE = 4 * MiB
DEPTH = 8  # pieces in flight in each direction
T = TypeVar("T", bound="StagedStore")


class Transfer:
    """The pieces of one copy. Stands for an event: whoever waits for it goes on when no thread works on them any more."""

    def __init__(self, pieces: Sequence[Future[None]], memory: list[torch.Tensor]) -> None:
        self._pieces = pieces
        self._memory = memory
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Raises the first error of any piece, also if somebody else has waited before."""
        self.settle()
        if self._error is not None:
            raise self._error

    synchronize = wait

    def settle(self) -> None:
        """Wait, and leave errors to those who want the bytes."""
        pieces = self._pieces
        wait_for(pieces)
        found = (_error_of(piece) for piece in pieces)
        self._error = self._error or next((error for error in found if error is not None), None)
        self._pieces = ()
        self._memory.clear()  # a thread has its last job for a moment longer, and would keep the source or the target

    def query(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def joined(self, other: Transfer) -> Transfer:
        """Both as one."""
        going = [piece for piece in self._pieces if not piece.done() or _error_of(piece) is not None]
        both = Transfer([*going, *other._pieces], [*(self._memory if going else ()), *other._memory])
        both._error = self._error or other._error
        return both


def _error_of(piece: Future[None]) -> BaseException | None:
    return HoldallError("the store was closed before the copy was made") if piece.cancelled() else piece.exception()


class Staging:
    """Buffers of a piece each, as many as threads need at once."""

    def __init__(self, tier: str, device: torch.device, notes: list[str]) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = (
            Buffers(f"{tier}, staging", None, prepare=partial(pin, notes), dispose=unpin)
            if is_cuda
            else Buffers(f"{tier}, staging", None)
        )
        self._lock = threading.Lock()

    @contextmanager
    def lent(self) -> Iterator[Buffer]:
        with self._lock:
            buffer = self._buffers.take(PIECE)
        try:
            yield buffer
        finally:
            with self._lock:
                self._buffers.give(buffer)

    def clear(self) -> None:
        with self._lock:
            self._buffers.clear()


class StagedStore(Blocking):
    """The calls of a `Keeper`; a member says where the bytes lie (`_buffers`), and how a piece is written and read."""

    name: ClassVar[str]
    behind: ClassVar[str] = "cpu"  # the host's memory: bytes of a GPU pass through it
    by_threads: ClassVar[bool] = True  # so that reads and writes go on side by side also where there is no GPU
    depths: ClassVar[tuple[int, ...]] = ()  # for the probe to try

    def __init__(self, *, device: torch.device | str, depth: int = DEPTH) -> None:
        where = torch.device(device)
        if where.type == "cuda" and where.index is None:  # threads have a current device of their own
            where = torch.device("cuda", torch.cuda.current_device())
        self.device = where
        self.notes: list[str] = []
        self._staging = Staging(self.name, self.device, self.notes)
        self._writers = ThreadPoolExecutor(depth, thread_name_prefix=f"holdall-{self.name}-write")
        self._readers = ThreadPoolExecutor(depth, thread_name_prefix=f"holdall-{self.name}-read")
        self._running: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._local = threading.local()  # a stream for each thread
        self.writing, self.reading = RequestTimes(), RequestTimes()

    def _own(self, *held: Callable[[], object]) -> None:
        """What is to be let go of when the store is closed, or nobody has it any more, or the process ends."""
        let_go: list[Callable[[], object]] = [partial(_stop, pool) for pool in (self._writers, self._readers)]
        let_go += [self._staging.clear, *held]
        self._shut: Callable[[], object] = weakref.finalize(self, _each, os.getpid(), let_go)

    # for members

    def _fits(self, room: Any, address: int, nbytes: int) -> bool:  # noqa: ARG002
        """Whether host memory can be written and read as it is; else it is copied to a staging buffer."""
        return True

    def _write(self, room: Any, begin: int, address: int, nbytes: int) -> None:
        """Bytes at this address to the room. Of a staging buffer, all of it may be touched."""
        raise NotImplementedError

    def _read(self, room: Any, begin: int, address: int, nbytes: int) -> None:
        raise NotImplementedError

    def memory(self, ticket: Ticket) -> torch.Tensor:
        raise NotImplementedError

    # activations

    def put_all(self, sources: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        tickets = [Ticket(source.nbytes()) for source in sources]
        leaving = [(ticket, source) for ticket, source in zip(tickets, sources, strict=True) if ticket.nbytes]
        rooms = self._buffers.take_all([ticket.nbytes for ticket, _ in leaving])
        for (ticket, source), room in zip(leaving, rooms, strict=True):
            ticket.buffer = room
            self.push(ticket, bytes_of(source))
        return tickets

    def get(self, ticket: Ticket, device: torch.device | str) -> torch.UntypedStorage:
        assert ticket.is_live, "this ticket was freed"
        target = torch.UntypedStorage(ticket.nbytes, device=device)
        if ticket.nbytes:
            ticket.target = target
            self.pull(ticket, bytes_of(target))
        return target

    def free(self, ticket: Ticket) -> None:
        assert ticket.is_live, "this ticket was freed already"
        ticket.is_live = False
        for copy in (ticket.out, ticket.back):
            if copy is not None:
                copy.settle()  # nobody wants the bytes any more, so errors do not matter
        ticket.out = ticket.back = ticket.source = ticket.target = None
        if ticket.buffer is not None:
            self._buffers.give(ticket.buffer)
            ticket.buffer = None

    # model states

    def push(self, ticket: Ticket, source: torch.Tensor, *, after: Any = None) -> None:
        earlier = ticket.out, ticket.back  # what is there may be on its way, or be read
        self._buffers.sent += min(ticket.nbytes, source.nbytes)
        ready = after if after is not None else _now(source)
        ticket.source = source.untyped_storage()
        ticket.out = self._issue(self._writers, self._leave, ticket, 0, source, earlier, ready)

    def arrived(self, ticket: Ticket) -> None:
        out = ticket.out
        if out is not None:
            out.wait()
            with self._lock:
                ticket.out = None if ticket.out is out else ticket.out

    def pull(self, ticket: Ticket, target: torch.Tensor, *, after: Any = None) -> Any:
        earlier = ticket.out, ticket.back  # so that who waits for the last fetch has waited for all
        self._buffers.fetched += min(ticket.nbytes, target.nbytes)
        chaos = current()
        if chaos is not None and after is None:
            chaos.poison(target[: ticket.nbytes])
        ready = after if after is not None else _now(target)
        ticket.back = self._issue(self._readers, self._come, ticket, 0, target, earlier, ready)
        return ticket.back

    def load(self, ticket: Ticket, begin: int, target: torch.Tensor, *, after: Sequence[Any] = ()) -> Any:
        self._buffers.loaded += target.nbytes
        return self._issue(self._readers, self._load, ticket, begin, target, after, None)

    def save(self, ticket: Ticket, begin: int, source: torch.Tensor) -> Any:
        self._buffers.saved += source.nbytes
        with self._lock:  # against `arrived` in another thread
            made = self._issue(self._writers, self._leave, ticket, begin, source, (ticket.back,), None)
            ticket.out = made if ticket.out is None else ticket.out.joined(made)
        return made

    def lane(self: T) -> T:
        """The same: it is the tier that serves one copy after the other, not a stream."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._shut = _nothing
        return other

    def begin_anew(self) -> None:
        wait_for(list(self._running))
        super().begin_anew()

    def close(self) -> None:
        self._shut()

    # copies

    def _issue(
        self, pool: ThreadPoolExecutor, job: Callable[..., None], ticket: Ticket, first: int, memory: torch.Tensor, *given: Any
    ) -> Transfer:
        """Copy between memory and the ticket's bytes from `first` on, in pieces that end at multiples of their size."""
        end = min(ticket.nbytes, first + memory.nbytes)
        chaos = current()
        begins: Sequence[int] = [first, *range(first - first % PIECE + PIECE, end, PIECE)] if first < end else []
        pieces, held = [], [memory]
        for begin in begins if chaos is None else chaos.shuffled(begins):
            size = min(end, begin - begin % PIECE + PIECE) - begin
            piece = pool.submit(job, ticket.buffer, held, begin, begin - first, size, *given)
            self._running.add(piece)
            piece.add_done_callback(self._running.discard)
            pieces.append(piece)
        return Transfer(pieces, held)

    def _leave(
        self, room: Any, held: list[torch.Tensor], begin: int, at: int, nbytes: int, earlier: Sequence[Any], ready: Any
    ) -> None:
        """In a thread: one piece of the source, from `at` on, goes to the tier."""
        _hold(earlier)
        (source,) = held
        address = 0 if source.is_cuda else source.data_ptr() + at
        if address and self._fits(room, address, nbytes):
            with self.writing.request(nbytes):
                self._write(room, begin, address, nbytes)
            return
        with self._staging.lent() as stage:
            if address:
                ctypes.memmove(stage.storage.data_ptr(), address, nbytes)
            else:
                self._on_stream(bytes_of(stage.storage)[:nbytes], source[at : at + nbytes], ready)
            with self.writing.request(nbytes):
                self._write(room, begin, stage.storage.data_ptr(), nbytes)

    def _load(
        self, room: Any, held: list[torch.Tensor], begin: int, at: int, nbytes: int, earlier: Sequence[Any], ready: Any
    ) -> None:
        """As `_come`, into memory that is written to the tier until then."""
        _hold(earlier)
        chaos = current()
        if chaos is not None:
            chaos.poison(held[0][at : at + nbytes])
        self._come(room, held, begin, at, nbytes, (), ready)

    def _come(
        self, room: Any, held: list[torch.Tensor], begin: int, at: int, nbytes: int, earlier: Sequence[Any], ready: Any
    ) -> None:
        """In a thread: one piece of the target, from `at` on, comes from the tier."""
        _hold(earlier)
        (target,) = held
        address = 0 if target.is_cuda else target.data_ptr() + at
        if address and self._fits(room, address, nbytes):
            with self.reading.request(nbytes):
                self._read(room, begin, address, nbytes)
            return
        with self._staging.lent() as stage:
            with self.reading.request(nbytes):
                self._read(room, begin, stage.storage.data_ptr(), nbytes)
            if address:
                ctypes.memmove(address, stage.storage.data_ptr(), nbytes)
            else:
                self._on_stream(target[at : at + nbytes], bytes_of(stage.storage)[:nbytes], ready)

    def _on_stream(self, target: torch.Tensor, source: torch.Tensor, ready: Any) -> None:
        """Copy between a GPU and a staging buffer, by a stream of this thread; over when it returns."""
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self.device)
        with torch.no_grad(), torch.cuda.stream(stream):
            stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
        stream.synchronize()


def _now(memory: torch.Tensor) -> Any:
    """The event after which a thread may touch this memory: the end of what was issued so far."""
    return torch.cuda.current_stream(memory.device).record_event() if memory.is_cuda else None


def _hold(earlier: Sequence[Any]) -> None:
    """Wait for copies that must be over before; a piece of bytes that did not arrive cannot be fetched."""
    for copy in earlier:
        if copy is not None:
            copy.wait()
    chaos = current()
    if chaos is not None:
        chaos.pause(0.3)


def _stop(pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=True, cancel_futures=True)


def _each(process: int, calls: Sequence[Callable[[], object]]) -> None:
    for call in calls if os.getpid() == process else ():  # a forked child owns none of it
        with suppress(OSError):
            call()


def _nothing() -> None:
    """A lane goes with the store that it was made from."""
