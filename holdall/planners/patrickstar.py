"""PatrickStar: states in equal chunks that move as activations rise and fall; the chunk that is needed last makes way.

Fang et al., TPDS 2023 (arXiv 2108.05818). A warm-up step records, moment by moment (a unit is about to be used), which chunks
are used and how many bytes of the device are no weights. Then:

- a chunk that is not on the device is fetched when it is used; chunks whose next use is farthest are evicted until all fit into
  what this moment and the next leave, less one chunk;
- as many chunks of optimizer states as 0.8 of the margin holds (the device less the most that others take, less all weights)
  stay on the device and are updated there; the host updates the others after backward;
- the size of chunks leaves the least room unused, of those of which the device holds two in a warm-up.

Here the trace is the warm-up, and the eviction is carried out in the planner for two steps; the loads of the second decide
which units are streamed (`planning/chunk_tracer.py`). Units that several blocks use lie outside of chunks and stay. Copies are
not overlapped with computation, as in the paper (`prefetch`: overlapped). Gradients have buffers of their own, where the paper
overwrites the weights with them, so they can be accumulated and clipped by their norm. Where a plan does not fit by the
simulator, the planner is told that the device has less memory.

Not here: several ranks (groups of chunks, gathered and scattered).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from holdall.errors import InvalidInput
from holdall.planning.chunk_tracer import (
    ChunkLayout,
    TracedStates,
    place_units,
    run_step,
    streamed_units,
    trace_states,
    units_within,
)
from holdall.planning.chunks import waste
from holdall.planning.within import Proposal, finish_within
from holdall.types import Action, Plan, Problem

SHARE = 0.8  # of a memory that is planned with
WARM_UP = 0.1  # of that, what chunks may take of the device in the warm-up
LARGEST = 128 << 20  # elements of a chunk, at most
EDGES = {
    "FREE": ("COMPUTE",),
    "HOLD": ("COMPUTE",),
    "COMPUTE": ("HOLD_AFTER_FWD", "HOLD_AFTER_BWD"),
    "HOLD_AFTER_FWD": ("COMPUTE",),
    "HOLD_AFTER_BWD": ("HOLD",),
}


@dataclass(frozen=True, kw_only=True)
class PatrickStar:
    chunk: int = 0  # elements; 0: the size that leaves the least room unused
    prefetch: bool = False  # copies overlap computation, the next unit's begins early; the paper leaves that to be done
    recompute: bool | None = None  # every block, or none; None: every block where nothing fits without

    name: ClassVar[str] = "patrickstar"
    paper: ClassVar[str] = "Fang et al., TPDS 2023, arXiv 2108.05818"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.chunk < 0:
            raise InvalidInput(f"`chunk` is {self.chunk} elements", hint="use 1 or more, or 0 to let it be chosen")
        recorded: dict[bool, ChunkLayout] = {}

        def propose(blocks: Sequence[Action], limit: int) -> Proposal:
            if bool(blocks) not in recorded:
                recorded[bool(blocks)] = self._layout(problem, trace_states(problem, blocks))
            return self._propose(problem, recorded[bool(blocks)], limit)

        return finish_within(self, problem, propose, recompute=self.recompute, began=began)

    def _layout(self, problem: Problem, traced: TracedStates) -> ChunkLayout:
        host = problem.limit(problem.other())
        return traced.layout(self.chunk or chunk_size(traced, problem.limit(problem.home), host))

    def _propose(self, problem: Problem, layout: ChunkLayout, limit: int) -> Proposal:
        count = chunks_updated_here(layout, limit)
        loads = steady_loads(layout, limit - sum(states_of(layout)[:count]))
        streamed = streamed_units(layout, loads)
        on_device = units_within(layout, range(count))
        place = place_units(problem, layout.traced, streamed=streamed, on_device=on_device, overlap=self.prefetch)
        why = (
            f"{len(layout)} chunks of {layout.size} elements: {sum(map(bool, loads))} are loaded in a step, "
            f"{count} are updated on the device",
            f"{len(streamed)} of {len(layout.traced.units)} units are streamed",
        )
        return Proposal(place, why)


def chunk_size(traced: TracedStates, device: int, host: int) -> int:
    """The size that leaves the least room unused, the smallest of equals. None accepted: the largest parameter's."""
    sizes = accepted_sizes(traced, device, host) or [max(traced.sizes, default=1)]
    return min(sizes, key=lambda size: (waste(traced.sizes, size), size))


def accepted_sizes(traced: TracedStates, device: int, host: int) -> list[int]:
    """Sizes that hold the largest parameter, of which the device holds two in a warm-up, and with which all states fit.

    `device`, `host`: bytes.
    """
    largest = max(traced.sizes, default=0)
    step = max(1, largest // 16)
    per_element = traced.width + traced.state_width
    total = sum(traced.sizes)
    found = []
    for size in range(max(1, largest), min(LARGEST, total) + 1, step):
        fits = 2 * size * traced.width <= SHARE * WARM_UP * device
        if fits and per_element * (total + waste(traced.sizes, size)) <= SHARE * (host + WARM_UP * device):
            found.append(size)
    return found


def states_of(layout: ChunkLayout) -> list[int]:
    """Bytes of every chunk's states, and of its gradients, which stay for an update on the device."""
    traced = layout.traced
    return [round(count * (traced.state_width + traced.width)) for count in layout.elements]


def chunks_updated_here(layout: ChunkLayout, limit: int) -> int:
    """How many chunks, the first ones, stay on the device with their states."""
    margin = SHARE * (limit - layout.traced.most_others - sum(layout.nbytes))
    count = taken = 0
    for nbytes in states_of(layout):
        taken += nbytes
        if taken > margin:
            break
        count += 1
    return count


def steady_loads(layout: ChunkLayout, limit: int) -> list[int]:
    """How often a step loads every chunk, once the step before has left the device as it will."""
    store = layout.store(EDGES)
    room = cache(lambda now: room_at(layout, now, limit))
    loads: list[int] = []
    for _ in range(2):
        loads = run_step(store, layout, room, forward=("HOLD_AFTER_FWD",), backward=("HOLD_AFTER_BWD",))
        for tensor, state in enumerate(store.states):
            if state == "HOLD_AFTER_BWD":
                store.move(tensor, "HOLD")  # updated
    return loads


def room_at(layout: ChunkLayout, now: int, limit: int) -> int:
    """Bytes for chunks: what this moment and the next leave, less one chunk."""
    moments = layout.traced.moments
    after = moments[min(now + 1, len(moments) - 1)]
    return limit - max(moments[now].others, after.others) - layout.size * layout.traced.width
