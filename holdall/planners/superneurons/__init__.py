"""SuperNeurons: liveness, a tensor pool over device and host, and cost-aware recomputation.

Wang et al., PPoPP 2018, arXiv 1801.04380. Three techniques, each on top of the one before:

- Liveness: a tensor is freed when no later op needs it (`liveness.py`). Autograd frees as early; so this is plain training.
- Unified tensor pool: checkpoints, which are results of convolutions, matrix products and joins and what enters or leaves a
  block, go to the host beside the next blocks, and come back beside their backward. They leave only when memory is short, the
  least recently used first (`cache.py`); where it is too short for copies under way, computation waits for them.
- Cost-aware recomputation: everything else is dropped in forward and run again in backward, each segment between checkpoints
  once or once per use, whichever keeps the peak at the largest set of tensors that a single op needs (`recomputation.py`).

The planner tries the pool alone and with recomputation of more and more blocks, each with as few blocks whose checkpoints leave
as fit, and takes the fastest. A segment ends with its block, and the checkpoints of a block leave and return together.

Not here: the choice of cuDNN's algorithm by the workspace that is left; torch chooses it here.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, NamedTuple

from holdall.actions.layer_swap import LayerSwap
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule
from holdall.errors import InvalidInput, unknown_name
from holdall.planners.superneurons.cache import eviction_order
from holdall.planners.superneurons.liveness import largest_working_set
from holdall.planners.superneurons.recomputation import STRATEGIES, checkpoints, limit_of, program
from holdall.planning.finish import finish, outcome_or_never
from holdall.planning.segments import saving
from holdall.planning.state_planners import NOTHING, missing_bytes
from holdall.simulator import lower
from holdall.types import Action, Plan, Problem, Trace
from holdall.units import format_bytes

_GRID = 16  # numbers of blocks whose checkpoints leave that are simulated, with and without recomputation
_SHARES = 4  # of the blocks that recompute: none, one in four, and so on
_NEVER = "none"
_WAYS = ((4, 4), (2, 2), (1, 1), (0, 1), (0, 0))  # blocks beside which copies out, and fetches, may run


@dataclass(frozen=True, kw_only=True)
class Superneurons:
    recompute: str = "cost-aware"  # or "speed", "memory": all segments in one way; "none": the pool alone
    blocks: int | None = None  # recompute, and let the checkpoints of so many blocks leave; None: only what the budget asks for

    name: ClassVar[str] = "superneurons"
    paper: ClassVar[str] = "Wang et al., PPoPP 2018, arXiv 1801.04380"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        self._check()
        l_peak = largest_working_set(problem.trace)
        found: list[_Candidate] = []
        for base in self._bases(problem, l_peak):
            pool = CheckpointPool(problem, base)
            for ways in _WAYS if problem.hardware.overlap else _WAYS[-1:]:
                found += self._fewest(
                    problem, base, pool.swaps(*ways), min((c.seconds for c in found if not c.missing), default=inf)
                )
        best = min(found, key=lambda c: (c.missing, c.seconds))
        return finish(self, problem, best.actions, why=_why(problem.trace, best.actions, l_peak), began=began)

    def _fewest(self, problem: Problem, base: list[Action], leaving: Sequence[Action], best: float) -> list[_Candidate]:
        """More and more blocks whose checkpoints leave, until the step fits, or takes as long as the `best` that does."""
        found: list[_Candidate] = []
        for count in _counts(len(leaving)) if self.blocks is None else [min(self.blocks, len(leaving))]:
            problem.progress("trying blocks to offload", count, len(leaving), "recomputing" if base else "")
            actions = [*base, *leaving[:count]]
            outcome = outcome_or_never(problem, actions)
            found.append(_Candidate(missing_bytes(problem, outcome), outcome.seconds, actions))
            if not found[-1].missing or best <= outcome.seconds < inf:
                break
        return found

    def _check(self) -> None:
        if self.recompute not in (*STRATEGIES, _NEVER):
            raise unknown_name("recompute of superneurons", self.recompute, (*STRATEGIES, _NEVER))
        if self.blocks is not None and self.blocks < 0:
            raise InvalidInput(f"`blocks` is {self.blocks}", hint="use 0 or more, or None for as few as fit the budget")

    def _bases(self, problem: Problem, l_peak: int) -> list[list[Action]]:
        """What is recomputed: nothing, or what lies between checkpoints, in all blocks or in the first of them."""
        if self.recompute == _NEVER or not problem.permits(Recompute):
            return [[]]
        again = programs(problem.trace, limit_of(self.recompute, l_peak))
        if self.blocks is not None:
            return [again]
        return [again[:count] for count in sorted({round(n * len(again) / _SHARES) for n in range(_SHARES + 1)})]


class _Candidate(NamedTuple):
    missing: int
    seconds: float
    actions: list[Action]


def programs(trace: Trace, limit: float) -> list[Action]:
    """Every block with its segments run again in backward, where it can be run op by op."""
    found = (program(trace, block, limit) for block in saving(trace))
    return [p for p in found if p is not None]


class CheckpointPool:
    """Checkpoints that can leave, block by block. `base`: programs of blocks."""

    def __init__(self, problem: Problem, base: Sequence[Action]) -> None:
        self.problem, self.trace = problem, problem.trace
        by_program = lower(problem, base).programs if base else {}
        self.kept: Mapping[int, Collection[int]] = {n: p.tensors for n, p in by_program.items()}

    def swaps(self, late: int, ahead: int) -> list[Action]:
        """The offloads, those first whose checkpoints the cache evicts first. `late`, `ahead`: copies out, and fetches, may run
        beside so many blocks. The last block's checkpoints stay: its backward comes next."""
        problem, trace = self.problem, self.trace
        if problem.hardware.far is None or not problem.permits(LayerSwap):
            return []
        blocks = saving(trace)
        found: dict[int, LayerSwap] = {}
        for place, block in enumerate(blocks[:-1]):
            until, fetch = (blocks[min(place + count, len(blocks) - 1)].name if count else "" for count in (late, ahead))
            swap = LayerSwap.of(trace, block, only={*block.inputs, *checkpoints(trace, block)}, kept=self.kept)
            if swap.tensors(trace):
                found[block.id] = replace(swap, until=until, fetch=fetch)
        moved = {n: swap.tensors(trace) for n, swap in found.items()}
        sizes = {n: sum(trace.tensors[x].nbytes for x in tensors) for n, tensors in moved.items()}
        order = eviction_order([(n,) for n in [*moved, *reversed(moved)]], sizes)
        return [found[n] for n in [*order, *(n for n in found if n not in order)]]


def _counts(most: int) -> list[int]:
    """How many blocks' checkpoints leave: any number, or about `_GRID` of them."""
    return sorted({round(n * most / _GRID) for n in range(_GRID + 1)})


def _why(trace: Trace, actions: Sequence[Action], l_peak: int) -> list[str]:
    if not actions:
        return [NOTHING]
    swaps = [a for a in actions if isinstance(a, LayerSwap)]
    moved = sum(trace.tensors[x].nbytes for a in swaps for x in a.tensors(trace))
    again = [a for a in actions if isinstance(a, Reschedule)]
    return [
        f"checkpoints of {len(swaps)} blocks ({format_bytes(moved)}) leave; {len(again)} blocks recompute what lies between",
        f"the largest set of tensors that one op needs is {format_bytes(l_peak)}",
    ]
