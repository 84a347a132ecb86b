"""Elixir: choose before the first step the size of chunks, how many are cached on the device, and which stay with their states.

Huang et al., arXiv 2212.05339. From the order in which a step uses parameters and the peak of its activations:

- **Size of chunks.** Of sizes from a power of two that holds the largest parameter up to three times that: the one that moves
  the fewest elements through a cache of as many blocks as the device has room for, if the chunk used again last makes way.
- **Cache or states first.** I: seconds that an element of memory saves if it holds cached weights. J: the same if it holds
  weights with their states, for an update on the device. The larger one gets the memory first. If it is the cache: all its
  blocks, then the states of chunks, in order, while there is room. Else: a base of blocks, then states, then more blocks.

Here the rates are those of the machine that is planned for; the paper's fits for one A100 node serve the tests. A unit's
weights stay if a step loads none of its chunks twice, and are streamed otherwise: as many bytes as the cache loads. Units that
several blocks use stay, as the paper's private chunks do. Where a plan does not fit by the simulator, the planner is told that
the device has less memory. I and J are the paper's and count writing a chunk back when it is evicted, which is not needed here.

Not here: several ranks (chunks gathered from a share in each).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from holdall.cost.link import link_rate
from holdall.errors import InvalidInput
from holdall.planning.chunk_tracer import ChunkLayout, TracedStates, place_units, streamed_units, trace_states, units_within
from holdall.planning.chunks import misses
from holdall.planning.within import Proposal, finish_within
from holdall.types import Action, Plan, Problem
from holdall.units import GiB

SMALLEST = 32 << 20  # bytes of a chunk on a GPU
RESERVE = 2 * GiB  # of a GPU: driver and libraries
BASE = 4  # blocks of the cache where states come first
EFFORT = 1 << 17  # sizes that are tried, times twice the parameters; the paper tries 128 times as many
AHEAD = 2  # blocks for the next chunk and for gradients on their way


@dataclass(frozen=True, kw_only=True)
class Elixir:
    overlap: bool = True  # the next unit is fetched and gradients leave while the device computes; takes two blocks
    usable: float = 0.95  # share that is planned with, of what activations leave
    activations: float = 1.25  # times the traced peak of all that is no weight
    chunk: int = 0  # elements; 0: the size that moves the fewest, of 32 MiB or more on a GPU
    recompute: bool | None = None  # every block, or none; None: every block where nothing fits without

    name: ClassVar[str] = "elixir"
    paper: ClassVar[str] = "Huang et al. 2022, arXiv 2212.05339"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if not 0 < self.usable <= 1:
            raise InvalidInput(f"`usable` is {self.usable}", hint="use a share above 0, of at most 1")
        if not self.activations >= 1:
            raise InvalidInput(f"`activations` is {self.activations}", hint="use a factor of 1 or more")
        if self.chunk < 0:
            raise InvalidInput(f"`chunk` is {self.chunk} elements", hint="use 1 or more, or 0 to let it be chosen")
        recorded: dict[bool, ChunkLayout] = {}

        def propose(blocks: Sequence[Action], limit: int) -> Proposal:
            if bool(blocks) not in recorded:
                traced = trace_states(problem, blocks)
                recorded[bool(blocks)] = traced.layout(self.chunk or self._size(problem, traced))
            return self._propose(problem, recorded[bool(blocks)], limit)

        return finish_within(self, problem, propose, recompute=self.recompute, began=began)

    def _size(self, problem: Problem, traced: TracedStates) -> int:
        smallest = SMALLEST // traced.width if problem.hardware.device == "cuda" else 0
        elements = self.capacity(problem, traced, problem.limit(problem.home))
        return chunk_size(traced, elements, smallest=smallest, ahead=self._ahead(problem))

    def _ahead(self, problem: Problem) -> int:
        return AHEAD if self.overlap and problem.hardware.overlap else 0

    def capacity(self, problem: Problem, traced: TracedStates, limit: int) -> int:
        """Elements: what is left beside activations and units that stay, less a buffer for the largest unit."""
        reserve = RESERVE if problem.hardware.device == "cuda" else 0
        of_unit = [0] * len(traced.units)
        for unit, size in traced.params:
            of_unit[unit] += size
        left = self.usable * (limit - reserve - self.activations * traced.most_others) / traced.width
        return max(0, int(left) - sum(of_unit[n] for n in traced.fixed) - max(of_unit))

    def _propose(self, problem: Problem, layout: ChunkLayout, limit: int) -> Proposal:
        elements, ahead = self.capacity(problem, layout.traced, limit), self._ahead(problem)
        worth = worth_on(problem, layout.traced)
        order = [c for c in range(len(layout)) if c not in layout.pinned]
        found = divide(worth, elements, layout.size, len(order), ahead=ahead, longest=longest_replay(layout, problem))
        with_states = set(order[: found.shards])
        streamed = streamed_units(layout, spare_loads(layout, with_states, found.blocks))
        if found.shards == len(order):
            with_states |= layout.pinned
        here = units_within(layout, with_states)
        place = place_units(problem, layout.traced, streamed=streamed, on_device=here, overlap=bool(ahead))
        first = "the cache" if found.cache_first else "states"
        why = (
            f"{len(order)} chunks of {layout.size} elements",
            f"memory goes to {first} first (I {worth.cache:.4f}, J {worth.states:.4f} seconds per 1e9 elements)",
            f"{found.blocks} blocks of cache, {found.shards} chunks with their states, {len(streamed)} units are streamed",
        )
        return Proposal(place, why)


# the size of chunks


def chunk_size(traced: TracedStates, elements: int, *, smallest: int, ahead: int) -> int:
    """The size that moves the fewest elements, the smallest of equals."""
    tried = sizes_to_try(max(traced.sizes, default=1), len(traced.sizes), smallest)
    return min(tried, key=lambda size: moved(traced, elements, size, ahead=ahead))


def sizes_to_try(largest: int, count: int, smallest: int) -> range:
    """From the first doubling of `smallest` that holds the largest parameter to three times that, in even steps."""
    low = smallest or largest
    while low < largest:
        low *= 2
    tries = max(1, EFFORT // (2 * _power_of_two(count)))
    return range(low, 3 * low + 1, max(1, min(1024, low), 2 * low // tries))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def moved(traced: TracedStates, elements: int, size: int, *, ahead: int) -> int:
    """Elements that a step moves through the cache, in and out: each load is a move in and, sooner or later, one out."""
    layout = traced.layout(size)
    accesses = [c for _, c in layout.accesses if c not in layout.pinned]
    blocks = min(max(1, elements // size - ahead), len(layout) - len(layout.pinned))
    return 2 * sum(misses(accesses, blocks)) * size


# memory for the cache or for states


class Worth(NamedTuple):
    """Seconds that 1e9 elements of memory save in a step."""

    cache: float  # I: they hold weights
    states: float  # J: they hold weights with their states
    ratio: float  # elements of memory that a parameter takes with its states


def worth(
    *, up: float, down: float, host: float, device: float, ranks: int = 1, param: float = 2, wide: float = 4, ratio: float = 7
) -> Worth:
    """The paper's test. `up`, `down`: GB/s; `host`, `device`: 1e9 updates a second; `param`, `wide`: bytes of an element."""
    cache = param / up + param / down
    states = (ranks / ratio) * (wide / up + cache + param / down + 1 / host - 1 / device)
    return Worth(cache, states, ratio)


def worth_on(problem: Problem, traced: TracedStates) -> Worth:
    hardware, units = problem.hardware, [u for u in traced.units if u.numel]
    far = problem.other()
    per_update = sum(u.moved for u in units) / max(1, sum(u.numel for u in units))  # bytes
    return worth(
        up=link_rate(hardware, far, problem.home) / 1e9,
        down=link_rate(hardware, problem.home, far) / 1e9,
        host=hardware.updates / 1e9,
        device=hardware.bandwidth / max(1.0, per_update) / 1e9,
        param=traced.width,
        ratio=1 + traced.state_width / traced.width,
    )


class Divided(NamedTuple):
    blocks: int  # of the cache
    shards: int  # chunks with their states on the device, the first ones
    cache_first: bool


def divide(worth: Worth, elements: int, size: int, count: int, *, ahead: int, longest: int = 0) -> Divided:
    """`elements` of memory for `count` chunks. `longest`: elements of the longest stretch that is recomputed at once."""
    most = min(max(0, elements // size - ahead), count)
    per_shard = math.ceil(worth.ratio * size)
    if worth.cache > worth.states:
        return Divided(most, _shards(elements - most * size, per_shard, count), True)
    blocks = min(most, max(BASE, -(-longest // size) + 1) + ahead)
    shards = _shards(elements - blocks * size, per_shard, count)
    left = max(0, elements - blocks * size - shards * per_shard) // size
    return Divided(min(count, blocks + left), shards, False)


def _shards(room: int, per_shard: int, count: int) -> int:
    return max(0, min(count, room // per_shard))


def longest_replay(layout: ChunkLayout, problem: Problem) -> int:
    """Elements of the largest unit: blocks are recomputed one by one."""
    return (
        max((sum(layout.elements[c] for c in chunks) for chunks in layout.of_units), default=0) if problem.trace.blocks else 0
    )


def spare_loads(layout: ChunkLayout, with_states: set[int], blocks: int) -> list[int]:
    """Twice for every chunk that a step loads more than once, with so many blocks; a first load brings new weights anyway."""
    accesses = [c for _, c in layout.accesses if c not in with_states and c not in layout.pinned]
    loads = [0] * len(layout)
    for chunk, missed in zip(accesses, misses(accesses, blocks), strict=True):
        loads[chunk] += missed
    return [2 * (count > 1 or (not blocks and count > 0)) for count in loads]
