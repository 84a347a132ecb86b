"""The arena of a plan's steps: memory that is allocated once, in front of the device's own allocator.

    first step   as always, and recorded: predicted requests lack what ops take and free inside. If each would have had its
                 place, the plan's offsets stay; if not, the recorded lifetimes are laid out in the same way. What stays on
                 a GPU between steps, such as optimizer states, is then moved together
    others       requests are counted from the first one on. Each lies at its offset, if it is recognised by place and size and
                 nothing lies there; else the device's allocator serves it. If that happens, the next step is recorded and laid
                 out again, a few times at most
    between      requests outside of steps are the device's allocator's

The arena's memory is free again when its last reference dies, for the next op of the same stream. So `Tensor.record_stream` is
replaced while the arena is in use: whoever calls it makes the free wait for that stream.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from holdall.errors import Unsupported
from holdall.registry import build_member
from holdall.runtime.arena.library import load, table
from holdall.types.arena import lay_out
from holdall.types.info import PlannedLayout
from holdall.types.layout import round_up
from holdall.types.lifetimes import StepLifetimes, lifetimes_of
from holdall.units import PAGE, format_bytes

_TYPES = {"cpu": 0, "cuda": 1}  # c10::DeviceType
_RECORDINGS = 4
_NOTED = 0.01  # share of its size that a layout may grow without a note
_LONGER_SEARCH = "imanishi"  # for recorded steps that another layout does not bring into the planned bytes


class ArenaCounts(NamedTuple):
    """What became of the requests of the last step."""

    placed: int = 0
    unknown: int = 0  # not in the plan: outside
    occupied: int = 0  # something else lay at the planned offset: outside
    live: int = 0  # bytes in the arena now
    peak: int = 0  # and at most
    outside: int = 0  # bytes requested outside, in all
    other_streams: int = 0  # requests of other streams: outside
    waits: int = 0  # frees that waited for another stream

    @property
    def missed(self) -> int:
        return self.unknown + self.occupied


class ArenaEvent(NamedTuple):
    """An allocation of a recorded step, or a free (size -1)."""

    key: int
    size: int
    offset: int  # -1: outside


class StepArena:
    """One per kind of device can be in use. Tensors that outlive it keep its memory."""

    def __init__(
        self,
        layout: PlannedLayout,
        device: torch.device,
        *,
        note: Callable[[str], None] = lambda _: None,
        first: int = 1,
        make_room: Callable[[], object] = lambda: None,
    ) -> None:
        """`first`: the number of the first step that lies in it, counted from 0; the one before is recorded.
        `make_room`: called before its memory is taken of a GPU."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise Unsupported("a planned layout is for one process", hint="leave `layout` out")
        index = device.index if device.index is not None else torch.cuda.current_device() if device.type == "cuda" else 0
        self.device = torch.device(device.type, index)
        self.layout, self._planned = layout, layout.reserved
        self.steps = 0
        self._first, self._note, self._make_room = first, note, make_room
        self._library = load()
        self._handle: int | None = None
        self._recordings = 0
        self._is_dry = self._is_recording = self._is_asked = self._is_poisoned = self._is_closed = False
        self._undo: Callable[[], object] = lambda: None

    @property
    def size(self) -> int:
        """Bytes that it has taken of the device."""
        return 0 if self._handle is None or self._is_dry else self._capacity

    @property
    def _capacity(self) -> int:
        return self._capacity_of(self.layout)

    def _capacity_of(self, layout: PlannedLayout) -> int:
        """On a GPU whole pages: the rest of the last one would be nobody's."""
        return round_up(max(layout.reserved, layout.align), PAGE if self.device.type == "cuda" else 1)

    def record_next(self) -> None:
        """Record the next step, for `recorded`."""
        self._is_asked = True

    def begin_step(self) -> None:
        if self._is_closed or self.steps < self._first - 1:
            return
        if self._is_recording:
            self._learn()
        if self._handle is None:
            self._open(dry=self.steps < self._first)
        if self._handle is not None:
            again = self.steps >= self._first and self.counts.missed > 0 and self._recordings < _RECORDINGS
            self._is_recording = self._is_asked or self._is_dry or again
            self._is_asked = False
            self._library.holdall_arena_begin(self._handle, int(self._is_recording))

    def end_step(self) -> None:
        self.steps += 1
        if self._handle is not None:
            self._library.holdall_arena_end(self._handle)

    def _learn(self) -> None:
        """Lay out what the recorded step asked for, unless each request had its place."""
        self._recordings += 1
        missed, events, was_dry = self.counts.missed, self.recorded(), self._is_dry
        if was_dry:
            self._leave()
        if not missed:
            return
        found = self._laid_out(lifetimes_of_events(events, self.layout.align, with_kept=not was_dry))
        more = found.reserved - self._capacity
        if more > _NOTED * self._capacity:
            self._note(f"a step's tensors take {format_bytes(more)} more in their layout than was planned")
        larger = self._make(found, dry=False) if more > 0 and not was_dry else None
        if larger is not None:  # tensors in the old memory keep it
            self._leave()
            self.layout = found
            self._use(larger, dry=False)
        elif was_dry:
            self.layout = found
        else:  # what is above its end lies outside
            self.layout = replace(found, reserved=self.layout.reserved)
            self._library.holdall_arena_replan(self._handle, *table(found.sizes, found.offsets, found.brief))

    def _laid_out(self, recorded: StepLifetimes) -> PlannedLayout:
        """By the plan's layout; where that takes more than was planned, by a longer search too."""
        made: list[PlannedLayout] = []
        for name in dict.fromkeys((self.layout.name, _LONGER_SEARCH)):
            if not made or made[0].reserved > self._capacity:
                made.append(lay_out(build_member("layouts", name, {}, f"layout {name}"), recorded, self.layout.smallest))
        return replace(min(made, key=lambda layout: layout.reserved), name=self.layout.name)

    def _open(self, *, dry: bool) -> None:
        """`dry`: only to record a step."""
        if not dry and self.device.type == "cuda":
            self._make_room()
        made = self._make(self.layout, dry=dry)
        if made is None and self._planned < self.layout.reserved:  # what is above its end lies outside
            self.layout = replace(self.layout, reserved=self._planned)
            made = self._make(self.layout, dry=dry)
        if made is None:
            self._give_up(f"{format_bytes(self._capacity)} for it cannot be allocated ({self._message()})")
        else:
            self._use(made, dry=dry)

    def _make(self, layout: PlannedLayout, *, dry: bool) -> int | None:
        """The handle of an arena; None: there is no memory for it."""
        is_gpu = self.device.type == "cuda"
        if is_gpu and not dry:
            torch.cuda.empty_cache()  # pages that are free in other places
        size, planned = self._capacity_of(layout), table(layout.sizes, layout.offsets, layout.brief)
        with torch.cuda.device(self.device) if is_gpu else nullcontext():
            kind, limits = _TYPES[self.device.type], (size, layout.align, layout.smallest)
            made = self._library.holdall_arena_make(kind, self.device.index, int(dry), *limits, *planned)
        return made or None

    def _use(self, made: int, *, dry: bool) -> None:
        """Come before the device's allocator."""
        self._handle, self._is_dry = made, dry
        if self._library.holdall_arena_hook(made):
            self._give_up(self._message())
            return
        before = self._library.holdall_arena_seen(made)
        torch.empty(1, dtype=torch.uint8, device=self.device)
        if self._library.holdall_arena_seen(made) == before:
            self._give_up("this version of torch has another allocator")
            return
        if self.device.type == "cuda":
            self._watch_streams()
        if self._is_poisoned:
            self.poison()

    def _message(self) -> str:
        return str(self._library.holdall_arena_message().decode(errors="replace")).partition("\n")[0]

    def _give_up(self, reason: str) -> None:
        self.close()
        self._note(f"the planned layout is not used, torch's allocator decides where tensors lie: {reason}")

    def _watch_streams(self) -> None:
        plainly, used_on = torch.Tensor.record_stream, self._library.holdall_arena_used_on

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            address = tensor.untyped_storage().data_ptr()
            if self._handle is None or not used_on(self._handle, address, stream.stream_id, stream.device_index):
                plainly(tensor, stream)

        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]
        self._undo = lambda: delattr(torch.Tensor, "record_stream")  # the function is its parent's

    @property
    def idle(self) -> int:
        """Bytes of its memory in which nothing lay at the last step's peak."""
        return self.size - self.counts.peak if self.size else 0

    def poison(self) -> None:
        """Fill memory with NaN when it is freed, to find whoever reads it later."""
        self._is_poisoned = True
        if self._handle is None:
            return
        fill, stream = None, None
        if self.device.type == "cuda":
            fill = ctypes.cast(_cuda_runtime().cudaMemsetAsync, ctypes.c_void_p)
            stream = torch.cuda.current_stream(self.device).cuda_stream
        self._library.holdall_arena_poison(self._handle, fill, stream)

    @property
    def base(self) -> int:
        """Its address; 0: it has no memory."""
        return int(self._library.holdall_arena_base(self._handle) or 0) if self._handle is not None else 0

    @property
    def counts(self) -> ArenaCounts:
        if self._handle is None:
            return ArenaCounts()
        found = (ctypes.c_int64 * len(ArenaCounts._fields))()
        self._library.holdall_arena_counts(self._handle, found)
        return ArenaCounts(*found)

    def recorded(self) -> list[ArenaEvent]:
        """The allocations and frees of the last recorded step, in order."""
        count = self._library.holdall_arena_recorded(self._handle, (ctypes.c_int64 * 0)(), 0)
        found = (ctypes.c_int64 * (3 * count))()
        self._library.holdall_arena_recorded(self._handle, found, count)
        return [ArenaEvent(*found[at : at + 3]) for at in range(0, 3 * count, 3)]

    def close(self) -> None:
        """Take it away from the allocator. Memory that tensors still use stays until they are gone."""
        self._is_closed = True
        self._leave()

    def _leave(self) -> None:
        self._undo()
        self._undo = lambda: None
        if self._handle is not None:
            self._library.holdall_arena_end(self._handle)
            self._library.holdall_arena_unhook(self._handle)
            self._library.holdall_arena_drop(self._handle)
            self._handle = None


def lifetimes_of_events(events: Sequence[ArenaEvent], align: int, *, with_kept: bool = True) -> StepLifetimes:
    """The lifetimes of a recorded step. What was still alive when the next one began has its place in all of it, or none."""
    born = {event.key for event in events if event.size >= 0}
    order = [(event.key, event.size) for event in events if event.key in born]
    kept = born - {key for key, size in order if size < 0}
    found = lifetimes_of(order, align=align)
    stay = tuple(t._replace(end=t.begin) if t.key in kept else t for t in found.tensors if with_kept or t.key not in kept)
    return replace(found, tensors=stay)


def _cuda_runtime() -> ctypes.CDLL:
    """The runtime library that torch has loaded."""
    for version in (13, 12):
        try:
            return ctypes.CDLL(f"libcudart.so.{version}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
    raise Unsupported("CUDA's runtime library is not among those loaded", hint="do without poisoned memory")
