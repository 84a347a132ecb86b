"""Gemini: chunks whose size wastes least, placed by fixed shares (static) or by what the step leaves (auto).

ColossalAI (Li et al., ICPP 2023; `colossalai/zero/gemini`).

- **Size of chunks.** Of sizes from the largest parameter on, in steps of `interval` over `search_range`: the one that leaves
  the fewest elements unused. Parameters more than three standard deviations larger than the mean do not count; each has a chunk
  of its own. A model below `min_chunk` is one chunk.
- **Auto.** Weights may take 0.9 of the device less what this moment and the next need for others. A chunk that is used must be
  there; of the others, those whose next use in this step is farthest are evicted. All states are on the host, but for chunks
  that `gpu_margin_mem_ratio` of the device's margin holds.
- **Static.** `offload_optim_frac` of the states are on the host, and, if that is all of them, `offload_param_frac` of the
  weights are streamed. Shares that are left out are the smallest that fit: first states leave, then weights.

Here the trace is the warm-up, and the eviction is carried out in the planner for two steps; the loads of the second decide
which units are streamed (`planning/chunk_tracer.py`). Units that several blocks use lie outside of chunks and stay. The static
policy gives the device the states of the first chunks, whose gradients come last, and streams the first chunks. Where an auto
plan does not fit by the simulator, the planner is told that the device has less memory. Copies overlap computation if
`max_prefetch` is 1 or more, counted in units.

Not here: several ranks (`shard_param_frac`, gathered and scattered chunks).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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

STEADY = 0.9  # of the device that the auto policy plans with
OUTLIER = 3  # standard deviations above the mean
SMALLEST = 32 << 20  # elements of a chunk on a GPU
EDGES = {
    "FREE": ("HOLD", "COMPUTE"),
    "HOLD": ("FREE", "COMPUTE"),
    "COMPUTE": ("HOLD", "HOLD_AFTER_BWD"),
    "HOLD_AFTER_BWD": ("COMPUTE", "READY_FOR_REDUCE"),
    "READY_FOR_REDUCE": ("HOLD",),
}


@dataclass(frozen=True, kw_only=True)
class Gemini:
    policy: str = "auto"  # "auto" or "static"
    offload_optim_frac: float | None = None  # static: share of the states on the host; None: the smallest that fits
    offload_param_frac: float | None = None  # static: share of the weights that is streamed; None: the smallest that fits
    gpu_margin_mem_ratio: float = 0.0  # auto: share of the device's margin that holds states
    min_chunk: int = 0  # elements; 0: 32 Mi on a GPU, the largest parameter on a CPU
    search_range: int = 0  # elements by which chunks may be larger than the smallest size; 0: as many as that has
    interval: int = 1024  # elements between two sizes that are tried; the model's width is best
    max_prefetch: int = 0  # units that are fetched ahead; 0: copies do not overlap computation
    recompute: bool | None = None  # every block, or none; None: every block where nothing fits without

    name: ClassVar[str] = "gemini"
    paper: ClassVar[str] = "ColossalAI: Li et al., ICPP 2023"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        self._check()
        recorded: dict[bool, ChunkLayout] = {}

        def propose(blocks: Sequence[Action], limit: int) -> Proposal:
            if bool(blocks) not in recorded:
                recorded[bool(blocks)] = self.layout(problem, trace_states(problem, blocks))
            layout = recorded[bool(blocks)]
            return self._auto(problem, layout, limit) if self.policy == "auto" else self._static(problem, layout, limit)

        asked = self.policy == "static" and self.offload_optim_frac is not None
        return finish_within(self, problem, propose, recompute=self.recompute, began=began, always=asked)

    def _check(self) -> None:
        if self.policy not in ("auto", "static"):
            raise InvalidInput(f"`policy` is {self.policy!r}", hint='use "auto" or "static"')
        shares = {
            "offload_optim_frac": self.offload_optim_frac,
            "offload_param_frac": self.offload_param_frac,
            "gpu_margin_mem_ratio": self.gpu_margin_mem_ratio,
        }
        for name, share in shares.items():
            if share is not None and not 0 <= share <= 1:
                raise InvalidInput(f"`{name}` is {share}", hint="use a share from 0 to 1")
        if self.offload_param_frac and self.offload_optim_frac not in (None, 1):
            raise InvalidInput("weights can be streamed only if all states are on the host", hint="use offload_optim_frac=1")
        if min(self.min_chunk, self.search_range, self.max_prefetch) < 0 or self.interval < 1:
            raise InvalidInput(
                "sizes and counts cannot be negative", hint="use `interval` of 1 or more, the others of 0 or more"
            )

    def layout(self, problem: Problem, traced: TracedStates) -> ChunkLayout:
        smallest = self.min_chunk or (SMALLEST if problem.hardware.device == "cuda" else max(traced.sizes, default=1))
        return traced.layout(chunk_size(traced.sizes, smallest, self.search_range or smallest, self.interval))

    def _placed(self, problem: Problem, layout: ChunkLayout, streamed: set[str], on_device: set[int]) -> Proposal:
        ahead = self.max_prefetch
        here = units_within(layout, on_device)
        place = place_units(problem, layout.traced, streamed=streamed, on_device=here, overlap=ahead > 0, prefetch=ahead or 1)
        why = (
            f"{self.policy}: {len(layout)} chunks of {layout.size} elements, {len(on_device)} are updated on the device",
            f"{len(streamed)} of {len(layout.traced.units)} units are streamed",
        )
        return Proposal(place, why)

    def _auto(self, problem: Problem, layout: ChunkLayout, limit: int) -> Proposal:
        loads, most = steady_loads(layout, limit)
        margin = self.gpu_margin_mem_ratio * (STEADY * limit - most)
        on_device = set(range(chunks_in(margin, layout)))
        return self._placed(problem, layout, streamed_units(layout, loads), on_device)

    def _static(self, problem: Problem, layout: ChunkLayout, limit: int) -> Proposal:
        """Shares that are not given follow from `limit`, from everything on the host (0) to nothing (the problem's)."""
        share = limit / max(1, problem.limit(problem.home))
        optim = min(1.0, 2 - 2 * share) if self.offload_optim_frac is None else self.offload_optim_frac
        param = max(0.0, 1 - 2 * share) if self.offload_param_frac is None else self.offload_param_frac
        if self.offload_optim_frac is None and self.offload_param_frac:
            optim = 1.0
        elif optim < 1:
            param = 0.0
        elements, total = layout.elements, sum(layout.elements)
        on_device = set(range(_chunks_up_to(elements, (1 - optim) * total)))
        movable = [c for c in range(len(layout)) if c not in layout.pinned]
        leave = movable[: _chunks_up_to([elements[c] for c in movable], param * total, beyond=True)]
        loads = [2 * (c in leave) for c in range(len(layout))]
        return self._placed(problem, layout, streamed_units(layout, loads), on_device)


def chunk_size(sizes: Sequence[int], smallest: int, search_range: int, interval: int) -> int:
    """The size that wastes least, the smallest of equals; for a small model, all of it."""
    if sum(sizes) < smallest or not sizes:
        return max(1, sum(sizes))
    usual = without_outliers(sizes)
    tried = sizes_to_try(max(smallest, *usual), min(search_range, sum(usual)), interval)  # larger ones waste more and more
    return min(tried, key=lambda size: waste(usual, size))


def sizes_to_try(smallest: int, search_range: int, interval: int) -> range:
    start = -(-smallest // interval) * interval
    return range(start, start + search_range + 1, interval)


def without_outliers(sizes: Sequence[int]) -> list[int]:
    most = statistics.fmean(sizes) + OUTLIER * statistics.pstdev(sizes)
    return [size for size in sizes if size <= most]


def chunks_in(margin: float, layout: ChunkLayout) -> int:
    """How many chunks, the first ones, `margin` bytes hold the states of, and the gradients, which stay with them."""
    traced = layout.traced
    return _chunks_up_to([count * (traced.state_width + traced.width) for count in layout.elements], margin)


def _chunks_up_to(sizes: Sequence[float], room: float, *, beyond: bool = False) -> int:
    """The first chunks that fit into `room`; `beyond`: the fewest that fill it."""
    sums = list(accumulate(sizes, initial=0.0))
    slack = 1e-9 * sums[-1]
    if beyond:
        return next((n for n, taken in enumerate(sums) if taken >= room - slack), len(sizes))
    return sum(taken <= room + slack for taken in sums[1:])


def with_next(others: Sequence[int]) -> list[int]:
    """The larger of each moment and the one after it."""
    return [max(pair) for pair in pairwise([*others, *others[-1:]])]


def steady_loads(layout: ChunkLayout, limit: int) -> tuple[list[int], int]:
    """(how often a step loads every chunk, most bytes of the device), once the step before has left it as it will."""
    store = layout.store(EDGES, wraps=False)
    others = with_next([moment.others for moment in layout.traced.moments])
    loads: list[int] = []
    most = 0

    def room(now: int) -> int:
        nonlocal most
        most = max(most, others[now] + store.used)
        return int(STEADY * limit) - others[now]

    for _ in range(2):
        most = 0
        loads = run_step(store, layout, room, forward=("HOLD",), backward=("HOLD_AFTER_BWD", "READY_FOR_REDUCE", "HOLD"))
    return loads, most
