"""One step as the warm-up of a chunk system measures it: which parameters are used when, and how many bytes are others'.

A unit is what the runtime moves, and chunks are what these systems decide about: a chunk may hold parts of several units, and a
unit may lie in several chunks. `streamed_units` turns the one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdall.actions.place import Place, streamable
from holdall.actions.place.schedule import users
from holdall.planning.chunks import ChunkStore, pack
from holdall.planning.finish import with_traced
from holdall.planning.state_planners import movable
from holdall.simulator import lower
from holdall.simulator.curve import memory_curve
from holdall.types import Action, Phase, Problem, Trace, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class UseMoment:
    """A unit is about to be used."""

    unit: int  # in `TracedStates.units`
    is_backward: bool
    others: int  # highest bytes of the device until the next moment, without the weights of `TracedStates.units`


@dataclass(frozen=True, kw_only=True)
class TracedStates:
    units: tuple[Unit, ...]  # those that may be placed, in the order of their first use
    fixed: frozenset[int]  # of these, whose weights cannot be streamed
    moments: tuple[UseMoment, ...]
    params: tuple[tuple[int, int], ...]  # (unit, elements) of every parameter
    width: int  # bytes of an element that the device computes with
    state_width: float  # bytes of its optimizer states and master

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the parameters that are packed into chunks: those of units that can be streamed."""
        return tuple(size for unit, size in self.params if unit not in self.fixed)

    @property
    def most_others(self) -> int:
        return max((m.others for m in self.moments), default=0)

    def layout(self, size: int) -> ChunkLayout:
        """Chunks of `size` elements; a unit that cannot be streamed has a chunk of its own."""
        packed = [n for n, (unit, _) in enumerate(self.params) if unit not in self.fixed]
        own = [[n for n, (unit, _) in enumerate(self.params) if unit == one] for one in sorted(self.fixed)]
        chunks = [[packed[n] for n in members] for members in pack(self.sizes, size)] + own
        return ChunkLayout(self, size, tuple(tuple(members) for members in sorted(chunks)))


@dataclass(frozen=True)
class ChunkLayout:
    """Parameters in chunks, in the order of their first use."""

    traced: TracedStates
    size: int  # elements of a chunk
    chunks: tuple[tuple[int, ...], ...]  # parameters of every chunk

    def __len__(self) -> int:
        return len(self.chunks)

    @cached_property
    def pinned(self) -> frozenset[int]:
        return frozenset(c for c, members in enumerate(self.chunks) if self.traced.params[members[0]][0] in self.traced.fixed)

    @cached_property
    def elements(self) -> list[int]:
        """Of every chunk, with the part that holds no parameter."""
        filled = [sum(self.traced.params[n][1] for n in members) for members in self.chunks]
        return [taken if c in self.pinned else max(self.size, taken) for c, taken in enumerate(filled)]

    @cached_property
    def nbytes(self) -> list[int]:
        """Bytes of the weights of every chunk."""
        return [self.traced.width * count for count in self.elements]

    @cached_property
    def of_units(self) -> list[list[int]]:
        """Chunks of every unit."""
        found: list[list[int]] = [[] for _ in self.traced.units]
        for c, members in enumerate(self.chunks):
            for unit in dict.fromkeys(self.traced.params[n][0] for n in members):
                found[unit].append(c)
        return found

    @cached_property
    def accesses(self) -> list[tuple[int, int]]:
        """(moment, chunk), in the order of a step."""
        found = []
        for now, moment in enumerate(self.traced.moments):
            chunks = self.of_units[moment.unit]
            found += [(now, c) for c in (reversed(chunks) if moment.is_backward else chunks)]
        return found

    def store(self, edges: Mapping[str, Sequence[str]], *, wraps: bool = True) -> ChunkStore:
        uses: list[list[int]] = [[] for _ in self.chunks]
        for now, chunk in self.accesses:
            uses[chunk].append(now)
        chunk_of = [0] * len(self.traced.params)
        for c, members in enumerate(self.chunks):
            for n in members:
                chunk_of[n] = c
        period = len(self.traced.moments)
        return ChunkStore(self.nbytes, chunk_of, uses, period, edges, wraps=wraps, pinned=self.pinned)


def run_step(
    store: ChunkStore, layout: ChunkLayout, room: Callable[[int], int], *, forward: Sequence[str], backward: Sequence[str]
) -> list[int]:
    """One step: how often every chunk is loaded.

    `room(moment)`: bytes for chunks. `forward`, `backward`: the states of a tensor after its use in each.
    """
    loads = [0] * len(layout)
    members: list[list[int]] = [[] for _ in layout.traced.units]
    for tensor, (unit, _) in enumerate(layout.traced.params):
        members[unit].append(tensor)
    of_chunk = [frozenset(chunk) for chunk in layout.chunks]
    for now, moment in enumerate(layout.traced.moments):
        store.shrink(now, room(now))
        chunks = layout.of_units[moment.unit]
        for chunk in reversed(chunks) if moment.is_backward else chunks:
            loads[chunk] += store.bring(chunk, now, room(now))
            for tensor in members[moment.unit]:
                if tensor in of_chunk[chunk]:
                    store.move(tensor, store.COMPUTE)
        for tensor in members[moment.unit]:
            for state in backward if moment.is_backward else forward:
                store.move(tensor, state)
    return loads


def streamed_units(layout: ChunkLayout, loads: Sequence[int]) -> set[str]:
    """Units to stream, for chunks that a step loads so often.

    The runtime loads a streamed unit twice and frees it after each use. A chunk that is loaded once shares its room with
    another that is loaded once, at another time: of the two, one is streamed and one stays. The bytes moved are the same.
    """
    order = sorted((c for c, count in enumerate(loads) if count), key=lambda c: (-loads[c], c))
    leave = set(order[: math.ceil(sum(loads) / 2)])
    return {
        unit.name
        for n, (unit, chunks) in enumerate(zip(layout.traced.units, layout.of_units, strict=True))
        if n not in layout.traced.fixed and leave.intersection(chunks)
    }


def units_within(layout: ChunkLayout, chunks: Collection[int]) -> set[str]:
    """Units all of whose chunks are among these."""
    return {u.name for u, own in zip(layout.traced.units, layout.of_units, strict=True) if set(own).issubset(chunks)}


def place_units(
    problem: Problem,
    traced: TracedStates,
    *,
    streamed: set[str],
    on_device: set[str],
    when: str = "step",
    overlap: bool = False,
    prefetch: int = 1,
) -> Place | None:
    """Units in `streamed` are streamed, others in `on_device` stay with their states; None: all stay."""
    rows = {}
    for unit in traced.units:
        if unit.name in streamed or unit.name not in on_device or not unit.numel:
            rows[unit.name] = ("streamed" if unit.name in streamed else "resident", "host")
    if not rows:
        return None
    return Place.of(
        problem.trace,
        rows,
        when=when,
        share=problem.accumulate == 1,
        overlap=overlap and problem.hardware.overlap,
        prefetch=prefetch,
    )


def trace_states(problem: Problem, blocks: Sequence[Action]) -> TracedStates:
    """The step with all weights on the device, all states on the host, and these actions on blocks."""
    trace = problem.trace
    units = movable(trace)
    place = Place.of(trace, {u.name: ("resident", "host") for u in units}, overlap=False)
    actions = with_traced(problem, [*blocks, place])
    curve, schedule = memory_curve(problem, actions), lower(problem, actions)
    placed = sum(schedule.info(x).nbytes for u in units for x in u.weights)
    can = streamable(trace)
    end = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
    found = sorted((at, n, back) for n, u in enumerate(units) for at, back in _uses(trace, u, u.name in can))
    until = [*(at for at, _, _ in found[1:]), end]
    params = tuple((n, math.prod(trace.tensors[x].shape)) for n, u in enumerate(units) for x in u.weights)
    total = sum(size for _, size in params) or 1
    return TracedStates(
        units=tuple(units),
        fixed=frozenset(n for n, u in enumerate(units) if u.name not in can),
        moments=tuple(
            UseMoment(unit=n, is_backward=back, others=max(curve.high[at : max(stop, at + 1)]) - placed)
            for (at, n, back), stop in zip(found, until, strict=True)
        ),
        params=params,
        width=max(1, round(placed / total)),
        state_width=sum(trace.tensors[x].nbytes for u in units for x in u.states) / total,
    )


def _uses(trace: Trace, unit: Unit, is_streamable: bool) -> list[tuple[int, bool]]:
    """(op, whether in backward) before which its weights must be there."""
    if is_streamable:
        block = users(trace)[unit.name][0]
        return [(block.first, False), *([(block.backward + 1, True)] if block.backward is not None else [])]
    found = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        at = [k for x in (*unit.weights, *unit.grads) for k in trace.uses(x) if trace.ops[k].site.phase is phase]
        found += [(min(at), phase is Phase.BACKWARD)] if at else []
    return found
