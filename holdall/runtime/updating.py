"""Updates of units: on the device, on the host beside it, or on the device with states that live on the host.

Every one of them is the user's own optimizer over the unit's parameters (`optim/_part.py`); they differ in where that runs and
in what must be moved for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdall.optim import _host
from holdall.optim._part import PIECE, Groups, Part, snapshot
from holdall.runtime.threads import Threads, host_threads
from holdall.runtime.units import DEVICE, Layout, Member, Unit, like
from holdall.tiers import Keeper, Ticket
from holdall.tiers._buffers import copy_tensor


@dataclass(frozen=True, slots=True)
class Order:
    """One update to be made: hyperparameters and factor as they were when the loop asked for it."""

    groups: Groups
    which: tuple[int, ...]  # members, among the trained, that have a gradient
    scale: torch.Tensor | None
    after: Any  # event: from here on the working weights may be overwritten


@dataclass(slots=True)
class Chunk:
    """Homes and states of a unit in one piece of pinned host memory."""

    ticket: Ticket
    layout: Layout
    keys: list[tuple[int, str]]  # after the homes: (member, name of the state)


class Slot:
    """Device memory that units pass through one after the other."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free: Any = None  # event after which it may be overwritten


class Updater:
    """Makes updates. `quiet` hides work on the host's memory from whoever counts the device's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Keeper | None,
        device: torch.device,
        *,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
        away: set[int] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.store = store
        self.device = device
        self.lane = store.lane() if store is not None else None
        self.back = store.lane() if store is not None else None  # new weights do not queue behind passing states
        self.quiet = quiet
        self.away = away if away is not None else set()  # storages that are not the device's
        few, many = host_threads(device)
        self._threads = {peek: Threads(few, many) for peek in (False, True)}  # what limits a peek need not limit an update
        self.outside = 0  # bytes of optimizer state in ordinary host memory
        self._done, self._took = 0, 0.0  # parameters that the host has updated by its fast kernel, and the seconds of that
        self._counts_there = {
            id(p): bool(g.get("fused") or g.get("capturable")) for g in optimizer.param_groups for p in g["params"]
        }
        self._parts: dict[str, Part] = {}
        self._chunks: dict[str, Chunk] = {}
        self._left: dict[str, set[tuple[int, str]]] = {}  # unit -> states that are not in its chunk, but in ordinary memory
        self._slots: list[Slot] = []
        self._sent: list[Ticket] = []  # copies out of the slots
        self._turn = 0
        self._pool: ThreadPoolExecutor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if store is not None:
            self.is_plain_adam(snapshot(optimizer))  # finds the fast kernel now rather than in the first step

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        self._slots = []

    def take(self, unit: Unit) -> None:
        """Take a unit on. While a step runs, the optimizer's groups are empty, so what is to be known of them is learnt now."""
        self._parts[unit.name] = Part(self.optimizer, [m.home for m in unit.trained])
        self._bring_states(unit)

    def part(self, unit: Unit) -> Part:
        return self._parts[unit.name]

    def states(self, members: Sequence[Member]) -> list[dict[str, Any]]:
        return [self.optimizer.state.get(m.home) or {} for m in members]

    def _keep(self, members: Sequence[Member], states: Sequence[dict[str, Any]], *, away: bool = False) -> None:
        for m, state in zip(members, states, strict=True):
            if state:
                self.optimizer.state[m.home] = state
            if away:
                there = [m.home, *(v for v in state.values() if isinstance(v, torch.Tensor))]
                self.away.update(t.untyped_storage()._cdata for t in there)

    def _bring_states(self, unit: Unit) -> None:
        """States that are there already go where their parameters went."""
        for m, state in zip(unit.trained, self.states(unit.trained), strict=True):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and self._follows(m, key, value):
                    state[key] = value.to(m.home.device)

    def return_states(self, unit: Unit) -> None:
        """States as ordinary memory where their parameters came from."""
        for m, state in zip(unit.trained, self.states(unit.trained), strict=True):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    to = m.came_from if self._follows(m, key, value) else value.device
                    state[key] = value.to(to, copy=unit.update != DEVICE)

    def _follows(self, member: Member, key: str, value: torch.Tensor) -> bool:
        """Whether a state lies where its parameter does: counters only where the rule wants them there."""
        if value.dim() > 0 or key != "step":
            return True
        return self._counts_there[id(member.home)]

    # on the device

    def on_device(self, unit: Unit, order: Order, grads: Sequence[torch.Tensor]) -> None:
        members = [unit.trained[n] for n in order.which]
        states = self.states(members)
        narrow = [m.work.detach() for m in members] if unit.is_narrow and unit.is_here else None
        self.part(unit).update(
            [m.home.detach() for m in members],
            grads,
            states,
            order.groups,
            order.which,
            scale=order.scale,
            narrow=narrow,
            sliced=self.device.type == "cuda",
        )
        self._keep(members, states)

    # on the host

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Let the host's processors do it, beside this thread."""
        if self._pool is None:
            threads = self._threads[False].few
            self._pool = ThreadPoolExecutor(
                max_workers=1, thread_name_prefix="holdall-update", initializer=lambda: torch.set_num_threads(threads)
            )
        return self._pool.submit(job)

    def on_host(self, unit: Unit, order: Order, grads: Sequence[torch.Tensor]) -> Any:
        """Returns the event after which the device has the new weights (None: now, or they are fetched when needed)."""
        assert self.lane is not None
        members = [unit.trained[n] for n in order.which]
        scale = order.scale.cpu() if order.scale is not None else None
        with self.quiet():
            states = self.states(members)
            is_first = not any(states)
            every = unit.host_weights(self.lane)
            narrow = [every[n] for n in order.which] if every else None
            if all(states) and self.is_plain_adam(order.groups, members):
                self.one_pass(unit, order, members, grads, states, scale, narrow)
            else:
                values = [m.home.detach() for m in members]
                self.part(unit).update(values, grads, states, order.groups, order.which, scale=scale, narrow=narrow)
            self._keep(members, states, away=is_first)
        if is_first:
            self.outside += sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))
        return None if unit.is_streamed else self.refresh(unit, order)

    def is_plain_adam(self, groups: Groups, members: Sequence[Member] = ()) -> bool:
        """Whether the fast host kernel does what the optimizer would: Adam or AdamW of float32 without extras.

        Where a CPU computes, its own bits are the reference: then those of the fused one alone.
        """
        if any(m.home.dtype != torch.float32 for m in members):
            return False
        if type(self.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        if any(g.get(extra) for g in groups for extra in ("amsgrad", "differentiable")):
            return False
        if self.device.type == "cpu" and not all(g.get("fused") for g in groups):
            return False
        return _host.is_exact() or self.device.type != "cpu"  # asked in any case: whoever asks first lets it be compiled

    def one_pass(
        self,
        unit: Unit,
        order: Order,
        members: Sequence[Member],
        grads: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        scale: torch.Tensor | None,
        narrow: Sequence[torch.Tensor] | None,
        *,
        steps: Sequence[torch.Tensor] | None = None,
        into: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None,
        peek: bool = False,
        is_awaited: bool = True,
    ) -> None:
        """All of the update in one walk over the host's memory, group by group; `steps`, `into`: not in place.

        `peek`: the new weights alone, into `narrow`. `is_awaited`: the next forward will wait for it.
        """
        began = time.perf_counter()
        choice = self._threads[peek]
        threads = choice.awaited() if is_awaited else choice.few
        for number, at in self.part(unit).by_group(order.which).items():
            group = order.groups[number]
            _host.update(
                [members[n].home.data for n in at],  # no version of the home's: nobody but us wrote into it
                [states[n]["exp_avg"] for n in at],
                [states[n]["exp_avg_sq"] for n in at],
                [steps[n] if steps is not None else states[n]["step"] for n in at],
                [grads[n] for n in at],
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=type(self.optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
                maximize=bool(group["maximize"]),
                scale=1.0 if scale is None else float(scale),
                out=[narrow[n] for n in at] if narrow is not None else None,
                into=([into[n][0] for n in at], [into[n][1] for n in at], [into[n][2] for n in at])
                if into is not None
                else None,
                peek=peek,
                threads=threads,
            )
        elements, seconds = sum(m.home.numel() for m in members), time.perf_counter() - began
        if not peek:
            self._done += elements
            self._took += seconds
        if is_awaited:
            choice.took(threads, elements, seconds)

    @property
    def rate(self) -> float | None:
        """Parameters per second that the host has shown; None: it has not."""
        return self._done / self._took if self._took else None

    def refresh(self, unit: Unit, order: Order) -> Any:
        """The device's working weights from what lies on the host."""
        assert self.back is not None and unit.flat is not None
        if unit.is_narrow and len(unit.trained) == len(unit.members):
            assert unit.buffer is not None
            return self.back.pull(unit.buffer, unit.flat, after=order.after)
        if not unit.is_narrow:
            assert unit.source is not None
            return self.back.pull(unit.source, unit.flat, after=order.after)
        assert unit.buffer is not None  # a narrow unit with frozen members: theirs have not changed
        every = iter(unit.grads.views(self.back.memory(unit.buffer)))
        for view, m in zip(unit.layout.views(unit.flat), unit.members, strict=True):
            if m.trained:
                copy_tensor(view, next(every))
        return None

    # through the device

    def room(self, nbytes: int, slots: int) -> None:
        """Take the memory that units pass through."""
        if not self._slots:
            self._slots = [Slot(nbytes, self.device) for _ in range(slots)]
            self._turn = 0

    def leave_room(self) -> None:
        """Give it back; the current stream goes on when nothing works in it any more."""
        for ticket in self._sent:
            assert self.lane is not None
            self.lane.wait(ticket)
        self._sent, self._slots = [], []

    def through_bytes(self, unit: Unit, grads: Layout) -> int:
        """What a unit needs of a slot: homes, states, gradient, new weights, and room to widen the gradient."""
        chunk = self._chunks[unit.name]
        wide = min(PIECE * 4, 4 * sum(m.home.numel() for m in unit.trained)) if unit.is_narrow else 0
        return chunk.layout.nbytes + grads.nbytes + (unit.layout.nbytes if unit.is_streamed else 0) + wide

    def adopt(self, unit: Unit) -> bool:
        """Move a unit's homes and states, once there are states, into one chunk; whether that is done. A step may have added
        to the states, or made them larger: then they move into another."""
        states = self.states(unit.trained)
        assert self.lane is not None
        if not all(states):
            return False
        keys = [
            (n, key)
            for n, s in enumerate(states)
            for key, v in s.items()
            if isinstance(v, torch.Tensor) and v.numel() and self._follows(unit.trained[n], key, v)
        ]
        before = self._chunks.get(unit.name)
        if before is not None and before.keys == keys and not self._left[unit.name]:
            return True
        layout = Layout.of([like(m.home) for m in unit.trained] + [like(states[n][key]) for n, key in keys])
        if before is not None:
            self.lane.arrived(before.ticket)
        ticket = self.lane.reserve(layout.nbytes)
        views = layout.views(self.lane.memory(ticket))
        left = self._left.get(unit.name, set(keys))
        with self.quiet():
            for m, view in zip(unit.trained, views, strict=False):
                copy_tensor(view, m.home.data)
                m.home.data = view
            for (n, key), view in zip(keys, views[len(unit.trained) :], strict=True):
                copy_tensor(view, states[n][key])
                if (n, key) in left:
                    self.away.discard(states[n][key].untyped_storage()._cdata)  # soon another's
                    self.outside -= view.nbytes
                states[n][key] = view
        if before is not None:
            self.lane.free(before.ticket)
        elif unit.homes is not None:
            if unit.source is unit.homes:
                unit.source = None  # the working weights come out of the chunk from now on
            if len(unit.trained) == len(unit.members):  # else frozen homes still lie there, until the store is closed
                self.lane.free(unit.homes)
        unit.homes = ticket
        self._keep(unit.trained, states, away=True)
        self._chunks[unit.name] = Chunk(ticket, layout, keys)
        self._left[unit.name] = set()
        return True

    def refill_chunks(self, units: Sequence[Unit]) -> None:
        """The optimizer's states were replaced by loaded ones: they move into the chunks."""
        for unit in units:
            chunk = self._chunks.get(unit.name)
            if chunk is None or self.lane is None:
                continue
            views = chunk.layout.views(self.lane.memory(chunk.ticket))[len(unit.trained) :]
            states = self.states(unit.trained)
            for (n, key), view in zip(chunk.keys, views, strict=True):
                copy_tensor(view, states[n][key])
                states[n][key] = view

    def through(self, unit: Unit, order: Order, ticket: Ticket, layout: Layout) -> Any:
        """Update on the device, states in and out. `ticket`, `layout`: the gradient on the host. Returns as `on_host`."""
        assert self.lane is not None
        chunk = self._chunks[unit.name]
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        states_at = slot.memory[: chunk.layout.nbytes]
        grads_at = slot.memory[chunk.layout.nbytes : chunk.layout.nbytes + layout.nbytes]
        rest = slot.memory[chunk.layout.nbytes + layout.nbytes :]
        after = slot.free if slot.free is not None else order.after
        self.lane.pull(chunk.ticket, states_at, after=after)
        here = self.lane.pull(ticket, grads_at, after=after)
        staged = rest[: unit.layout.nbytes] if unit.is_streamed else rest[:0]
        if unit.is_streamed and len(unit.trained) < len(unit.members):  # the frozen ones go back as they were
            assert unit.source is not None
            here = self.lane.pull(unit.source, staged, after=after)
        stream = torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
        with stream:
            if self._stream is not None:
                self._stream.wait_event(here)
                self._stream.wait_event(order.after)
            views = chunk.layout.views(states_at)
            own = self.states(unit.trained)
            states = [dict(s) for s in own]
            for (n, key), view in zip(chunk.keys, views[len(unit.trained) :], strict=True):
                states[n][key] = view
            grads = layout.views(grads_at)
            weights = unit.weights()
            if unit.is_streamed:
                weights = [v for v, m in zip(unit.layout.views(staged), unit.members, strict=True) if m.trained]
            self.part(unit).update(
                [views[n] for n in order.which],
                [grads[n] for n in order.which],
                [states[n] for n in order.which],
                order.groups,
                order.which,
                scale=order.scale,
                narrow=[weights[n] for n in order.which],
                sliced=True,
                scratch=rest[staged.numel() :].view(torch.float32) if unit.is_narrow else None,
            )
            self._take_back(unit, chunk, views[len(unit.trained) :], own, states)
            ready = self._stream.record_event() if self._stream is not None else None
        self.lane.push(chunk.ticket, states_at, after=ready)
        self._sent.append(chunk.ticket)
        slot.free = chunk.ticket.out
        if unit.is_streamed:
            assert unit.source is not None
            self.lane.push(unit.source, staged, after=ready)
            self._sent.append(unit.source)
            slot.free = unit.source.out
        return ready

    def _take_back(
        self,
        unit: Unit,
        chunk: Chunk,
        views: Sequence[torch.Tensor],
        own: Sequence[dict[str, Any]],
        states: Sequence[dict[str, Any]],
    ) -> None:
        """What an update left in the states that it was given, where it put other tensors there than those of the chunk."""
        there = dict(zip(chunk.keys, views, strict=True))
        for n, (mine, new) in enumerate(zip(own, states, strict=True)):
            for key, value in new.items():
                view = there.get((n, key))
                if view is not None and value is view:
                    continue
                if view is not None and (value.shape, value.dtype) == (view.shape, view.dtype):
                    view.copy_(value)
                elif isinstance(value, torch.Tensor) and value.numel() and self._follows(unit.trained[n], key, value):
                    with self.quiet():
                        mine[key] = value.to(unit.trained[n].home.device, copy=True)
                    self.away.add(mine[key].untyped_storage()._cdata)
                    self.outside += mine[key].nbytes
                    self._left[unit.name].add((n, key))
                else:
                    mine[key] = value
