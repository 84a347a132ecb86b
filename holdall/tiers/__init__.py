"""Tiers: memories beyond the device's, which bytes can be copied to. Each file is a tier of that name; its `Store` copies.

A new tier is one file with one class: the calls below, `name` (the file's), `serves` (kinds of device), and a constructor that
takes `capacity` and `device`. It joins a machine where a budget names it, and its rates are then measured by its own copies.
Where it has them, these are asked too: `room()` (bytes that it could hold), `where()` (what its rates depend on, such as a
folder), `behind` (the tier that its bytes pass through), `depths` (numbers of requests in flight to measure it with), and
`prepare(nbytes)` (take room for what a plan needs, or refuse, before the first step).

    put      starts copying a storage's bytes out of the accelerator's memory
    wait     from here on the current stream may reuse the source's memory; the ticket lets go of the source
    get      takes memory on the accelerator and starts copying the bytes back
    wait_in  from here on the current stream may read what `get` returned
    free     the bytes are no longer needed here

Model states live in a farther memory for good. For them:

    reserve  takes room there, and nothing is copied
    memory   that room as bytes that the host's processors can work on
    push     starts copying into it; `arrived` lets the host wait for that
    pull     starts copying from it into memory that is there already
    load     starts copying a part of it into the host's memory
    save     starts copying from there into a part of it
    lane     the same memory by copy streams of its own, so that its copies do not queue behind others

Several storages may go together: `put_all` and `get_all` are as one call for each, and cost the caller far less.

The same calls in the same order are right for every member: where copies are synchronous the waits do nothing. Whole storages
travel, not tensors, because views share them. Copies are hidden from dispatch modes, so that whoever watches the user's ops
does not see them. A store serves one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch

from holdall.errors import Unsupported


@dataclass(slots=True, eq=False)
class Ticket:
    """A handle for stored bytes, held by the caller; all fields but `nbytes` belong to the store."""

    nbytes: int
    buffer: Any = None  # the memory of the bytes; None: there is none (no bytes, or a store that keeps none)
    out: Any = None  # event: the copy to the tier is complete
    back: Any = None  # event: the last fetch is complete
    source: torch.UntypedStorage | None = None  # referenced until its copy is complete, so that its memory is not reused before
    target: torch.UntypedStorage | None = None  # the same for the memory that a fetch writes to
    is_live: bool = True
    tier: str = ""  # that it was reserved in, where there are several; empty: the nearest


def let_wait(event: Any, device: torch.device) -> None:
    """Make the device's current stream wait for this event."""
    if isinstance(event, torch.cuda.Event):
        torch.cuda.current_stream(device).wait_event(event)
    else:
        event.wait()  # the host's: for copies by threads, or those that chaos put off


class Store(Protocol):
    name: ClassVar[str]  # the file's
    serves: ClassVar[frozenset[str]]  # kinds of device whose bytes it takes: "cuda", "cpu"
    notes: list[str]  # warnings for the user

    @property
    def device(self) -> torch.device:
        """The device whose bytes it stores."""
        ...

    @property
    def used(self) -> int:
        """Bytes of live tickets."""
        ...

    @property
    def peak(self) -> int:
        """The maximum of `used`."""
        ...

    @property
    def held(self) -> int:
        """Bytes of memory allocated, including those kept for reuse."""
        ...

    @property
    def sent(self) -> int:
        """Bytes copied here so far, by all lanes."""
        ...

    @property
    def fetched(self) -> int:
        """Bytes copied back so far, by all lanes."""
        ...

    def put(self, source: torch.UntypedStorage) -> Ticket: ...

    def put_all(self, sources: Sequence[torch.UntypedStorage]) -> list[Ticket]:
        """Store all of them, or none if there is no room for all."""
        ...

    def landed(self, ticket: Ticket) -> bool:
        """Whether the bytes have arrived, without waiting; if so, the ticket lets go of the source."""
        ...

    def wait(self, ticket: Ticket) -> None: ...

    def get(self, ticket: Ticket, device: torch.device | str) -> torch.UntypedStorage: ...

    def get_all(self, tickets: Sequence[Ticket], device: torch.device | str) -> list[torch.UntypedStorage]: ...

    def wait_in(self, ticket: Ticket) -> None: ...

    def free(self, ticket: Ticket) -> None: ...

    def begin_anew(self) -> None:
        """Tickets that are still out become void; memory that was given back stays at hand for others of its size."""
        ...

    def close(self) -> None:
        """Give all memory back. Tickets that are still out become void."""
        ...


class Stores(dict[str, Store]):
    """The stores of a run, by tier. The budget names its tiers, from the device on outwards."""

    def __init__(self, stores: Iterable[Store] = (), budget: Iterable[str] = ()) -> None:
        super().__init__({store.name: store for store in stores})
        self._near = next(iter(list(budget)[1:]), "")
        self.counters: list[dict[str, int]] = []  # of bytes that no store moves, such as those of collectives: link -> so far

    @property
    def near(self) -> str:
        """The tier that is meant where none is named: the nearest."""
        return self._near or next(iter(self), "")

    def fill(self, tiers: Iterable[str], make: Callable[[], Iterable[Store]]) -> None:
        """Take over the stores of these tiers, as far as there are none."""
        if {tier or self.near for tier in tiers} - self.keys():
            for store in make():
                if self.setdefault(store.name, store) is not store:
                    store.close()

    @property
    def nearest(self) -> Keeper | None:
        """The store of the nearest tier, where model states live; None: nothing goes there."""
        return cast("Keeper | None", self.get(self.near))

    def at(self, tier: str) -> Store:
        """The store of a tier; of the nearest, if there is no name."""
        name = tier or self.near
        if name not in self:
            raise Unsupported(
                f"the plan copies bytes to the tier `{name or 'another tier'}`, and this harness has no store for it",
                hint="use `holdall.apply`, which makes the stores that a plan needs",
            )
        return self[name]

    def copied(self, home: str) -> dict[str, int]:
        """Bytes copied so far by link, such as "cuda->cpu"; `home`: the device's tier."""
        out = {f"{home}->{name}": store.sent for name, store in self.items()}
        out |= {f"{name}->{home}": store.fetched for name, store in self.items()}
        beyond = {name: store for name, store in self.items() if name != self.near}
        out |= {f"{self.near}->{name}": getattr(store, "saved", 0) for name, store in beyond.items()}
        out |= {f"{name}->{self.near}": getattr(store, "loaded", 0) for name, store in beyond.items()}
        return {**out, **{link: size for counter in self.counters for link, size in counter.items()}}

    def close(self) -> None:
        for store in self.values():
            store.close()

    def begin_anew(self) -> None:
        for store in self.values():
            store.begin_anew()


class Keeper(Store, Protocol):
    """A store that can hold model states."""

    def reserve(self, nbytes: int, *, pinned: bool = True) -> Ticket: ...

    def memory(self, ticket: Ticket) -> torch.Tensor: ...

    def push(self, ticket: Ticket, source: torch.Tensor, *, after: Any = None) -> None:
        """`after`: an event to wait for, in the place of what was issued so far on the current stream."""
        ...

    def arrived(self, ticket: Ticket) -> None: ...

    def pull(self, ticket: Ticket, target: torch.Tensor, *, after: Any = None) -> Any:
        """As many bytes as the target has, from the beginning. The event after which it may be read, for `let_wait`; None: now.
        `wait_in` does not wait for it: the target is the caller's."""
        ...

    def load(self, ticket: Ticket, begin: int, target: torch.Tensor, *, after: Sequence[Any] = ()) -> Any:
        """Bytes from `begin` on into host memory. To be waited for with `.wait()`; None: it is over.

        It does not wait for a `save` into other bytes of the ticket; what has to be over first is named in `after`.
        """
        ...

    def save(self, ticket: Ticket, begin: int, source: torch.Tensor) -> Any:
        """The other way. `arrived` waits for all of them."""
        ...

    def lane(self) -> Keeper: ...
