"""Capuchin: swap tensors whose copies computation hides, then the cheaper of waiting for a copy and computing again.

Peng et al., ASPLOS 2020. The step repeats its accesses, so one iteration tells for every tensor when it could leave and when
it is needed again (here the trace does; `accesses.py`).

- Tensors in memory at the peak are swapped by decreasing free time as long as copies, one after the other on each way, are
  hidden.
- Then the tensor with the most bytes per second of recomputation (MSPS, with the paper's updates; `recomputation.py`) is
  computed again, or swapped where waiting for its copies costs less; and so on until the saving suffices.
- A fetch is hung on an earlier access, moved earlier by 5 % of its own time as long as it is late (`triggers.py`). The paper
  learns that from step to step; here simulated steps teach it, so that memory stays as predicted.

Decisions do not depend on the budget, which says how many of them are taken: the fastest prefix that fits. Memory of a copy
out is freed when it should be done; where that is too late for the budget, computation waits for it earlier. Recomputed tensors
of a block are made together (collective recomputation), each op once.

Not here: a trigger is the beginning of a block's backward, not any access; a copy out begins at the end of the block's forward;
tensors that several blocks hold, and those outside of blocks, stay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from holdall.actions.offload import Offload
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.capuchin.accesses import HeldTensor, candidates, holding, in_peak_window
from holdall.planners.capuchin.recomputation import Recomputation, recomputation
from holdall.planners.capuchin.triggers import Triggers, overhead, waited_for
from holdall.planning.finish import allocator_of, finish, over_budget, with_traced
from holdall.simulator import simulate
from holdall.types import Action, Outcome, Plan, Problem
from holdall.types.program import lazily
from holdall.units import format_bytes

_GRID = 16  # prefixes of the decisions that are simulated
_PATIENCE = (None, 1, 0)  # blocks that copies may take: as many as they need, or fewer, which costs less memory


class Decision(NamedTuple):
    candidate: HeldTensor
    again: bool  # compute it again; else swap it


@dataclass(frozen=True, kw_only=True)
class Capuchin:
    feedback: int = 3  # simulated steps after which late triggers are moved earlier

    name: ClassVar[str] = "capuchin"
    paper: ClassVar[str] = "Peng et al., ASPLOS 2020"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.feedback < 0:
            raise InvalidInput(f"`feedback` is {self.feedback} steps", hint="use 0 or more")
        decisions = decide(problem)
        tried = [
            (outcome, actions, count)
            for count in _prefixes(decisions)
            for most in _PATIENCE[: 1 if all(d.again for d in decisions[:count]) or not problem.hardware.overlap else None]
            for outcome, actions in self._steps(problem, decisions[:count], Triggers(problem, most))
        ]
        fitting = [t for t in tried if not over_budget(problem, t[0])]
        _, actions, count = (
            min(fitting, key=lambda t: (t[0].seconds, t[2]))
            if fitting
            else min(tried, key=lambda t: max(t[0].peak[problem.home], t[0].reserved or 0))
        )
        return finish(self, problem, actions, why=_said(decisions, count, len(tried)), began=began)

    def _steps(self, problem: Problem, decisions: Sequence[Decision], triggers: Triggers) -> list[tuple[Outcome, list[Action]]]:
        """The simulated step, and those after it in which late triggers are earlier."""
        swaps = [d.candidate for d in decisions if not d.again]
        leads: dict[int, float] = {}
        found: list[tuple[Outcome, list[Action]]] = []
        while True:
            actions = actions_of(problem, triggers, decisions, leads)
            full = bool(swaps) and problem.hardware.overlap
            try:
                outcome = simulate(problem, with_traced(problem, actions), full=full, allocator=allocator_of(problem))
            except Unsupported:
                return found
            found.append((outcome, actions))
            late = waited_for(outcome.lanes)
            if len(found) > self.feedback or triggers.most is not None or not triggers.feedback(swaps, leads, late):
                return found


def decide(problem: Problem) -> list[Decision]:
    """All decisions, in the order in which they are taken."""
    trace = problem.trace
    found = candidates(problem)
    swappable = problem.hardware.far is not None and problem.permits(Offload)
    pools: dict[int, Recomputation] = {}
    if problem.permits(Recompute):
        for block in holding(trace):
            own = [c.tensor for c in found if c.block == block.id and c.input is None]
            if own and not obstacle(trace, block):
                pools[block.id] = recomputation(trace, block, own)
    window = in_peak_window(trace, found)
    inside = {c.tensor for c in window}
    chosen = _hybrid(problem, window, pools, swappable=swappable)
    taken = {d.candidate.tensor for d in chosen}
    rest = [c for c in found if c.tensor not in inside and c.tensor not in taken]
    return [*chosen, *_hybrid(problem, rest, pools, swappable=swappable, before=chosen)]


def _hybrid(
    problem: Problem,
    found: Sequence[HeldTensor],
    pools: dict[int, Recomputation],
    *,
    swappable: bool,
    before: Sequence[Decision] = (),
) -> list[Decision]:
    """The paper's policy for these candidates: hidden swaps first, then the cheaper of swap and recomputation."""
    turn = Triggers(problem).turn
    swaps = [d.candidate for d in before if not d.again]
    decisions: list[Decision] = []
    left = {c.tensor: c for c in sorted(found, key=lambda c: (-c.swap.free_time, c.tensor))}

    def waiting(c: HeldTensor) -> float:
        if not problem.hardware.overlap:
            return c.swap.out + c.swap.into
        return max(0.0, overhead([*swaps, c], turn)) - max(0.0, overhead(swaps, turn))

    def take(c: HeldTensor, *, again: bool) -> None:
        decisions.append(Decision(c, again))
        if again:
            pools[c.block].choose(c.tensor)
        else:
            swaps.append(c)
        del left[c.tensor]

    if swappable and problem.hardware.overlap:
        for c in list(left.values()):
            if c.swap.free_time < 0:
                break
            if overhead([*swaps, c], turn) <= 0:
                take(c, again=False)
    while left:
        again = [c for c in left.values() if c.block in pools and c.tensor in pools[c.block].nbytes]
        best = max(again, key=lambda c: (pools[c.block].msps(c.tensor), -c.tensor), default=None)
        if best is not None:
            is_cheaper = swappable and waiting(best) < pools[best.block].cost(best.tensor)
            take(best, again=not is_cheaper)
        elif swappable:
            take(next(iter(left.values())), again=False)
        else:
            break
    return decisions


def actions_of(
    problem: Problem, triggers: Triggers, decisions: Sequence[Decision], leads: dict[int, float] | None = None
) -> list[Action]:
    """Programs for blocks with tensors that are computed again, and offloads."""
    trace = problem.trace
    again: dict[int, set[int]] = {}
    for d in decisions:
        if d.again:
            again.setdefault(d.candidate.block, set()).add(d.candidate.tensor)
    programs: list[Action] = []
    for number, targets in sorted(again.items()):
        block = trace.blocks[number]
        ops, count = region(trace, block)
        keep = frozenset(trace.saves[n].tensor for n in block.saves) - targets
        programs.append(Reschedule.of(trace, block, lazily(effects(ops), count, keep)))
    return [*programs, *triggers.offloads([d.candidate for d in decisions if not d.again], again, leads)]


def _prefixes(decisions: Sequence[Decision]) -> list[int]:
    """How many decisions are taken: any number, or about `_GRID` numbers that divide the bytes evenly."""
    if len(decisions) <= _GRID:
        return list(range(len(decisions) + 1))
    total = sum(d.candidate.nbytes for d in decisions)
    found, size = [0], 0
    for n, d in enumerate(decisions, 1):
        size += d.candidate.nbytes
        if size * _GRID >= len(found) * total:
            found.append(n)
    return sorted({*found, len(decisions)})


def _said(decisions: Sequence[Decision], count: int, tried: int) -> list[str]:
    taken = decisions[:count]
    sizes = [sum(d.candidate.nbytes for d in taken if d.again is again) for again in (False, True)]
    counts = [sum(d.again is again for d in taken) for again in (False, True)]
    return [
        f"{counts[0]} tensors ({format_bytes(sizes[0])}) are swapped, {counts[1]} ({format_bytes(sizes[1])}) computed again, "
        f"of {len(decisions)}; {tried} steps were simulated"
    ]
