"""TSPLIT: swap tensors, compute them again, or split the ops that make them, whichever costs least for the bytes it saves.

Nie, Miao, Yang, Cui, "TSPLIT: Fine-grained GPU Memory Management for Efficient DNN Training via Tensor Splitting" (ICDE 2022).
One op's tensors may exceed the memory even if all others are away; so a module may run in pieces, which hold their results one
after the other (`actions/pieces`): MLPs and norms by positions of the sequence, convolutions by samples of the batch.

The search is greedy and guided by a model of the step's memory and link (`model.py`, `search.py`): at the op that needs most,
the decision with the most bytes saved per second is taken, until nothing helps. The budget says how many decisions are taken:
the fastest number of them that fits, in the simulator, which judges. Candidates are besides: the same search without splits,
the same with copies that are waited for, and all modules in as many pieces. So a plan fits wherever one of these does, and
splitting never makes a plan slower.

Pieces of a module are computed again in backward, one by one; tensors between ops that are not split are swapped whole. Not
here: pieces that are swapped while the next is computed; splits along other dimensions than rows; a row of ops across blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, NamedTuple

from holdall.actions.layer_swap import LayerSwap
from holdall.actions.pieces import Pieces
from holdall.actions.recompute import Recompute
from holdall.errors import InvalidInput
from holdall.planners.capuchin import Decision, actions_of
from holdall.planners.capuchin.triggers import Triggers
from holdall.planners.tsplit.model import WAITED
from holdall.planners.tsplit.search import SplitSearch, SplitTraces, State, chosen_prefixes, moved_whole, waiting_tensors
from holdall.planning.finish import finish, outcome_or_never
from holdall.planning.state_planners import NOTHING, missing_bytes
from holdall.simulator import lower
from holdall.types import Action, Plan, Problem
from holdall.units import format_bytes

_GRID = 16  # numbers of decisions that are simulated, with and without splits
_PATIENCE = (None, 1, 0)  # blocks that copies may take: as many as they need, or fewer, which costs less memory


@dataclass(frozen=True, kw_only=True)
class Tsplit:
    pieces: int = 8  # of a module, at most; 1: none is split

    name: ClassVar[str] = "tsplit"
    paper: ClassVar[str] = "Nie et al., ICDE 2022"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.pieces < 1:
            raise InvalidInput(f"`pieces` is {self.pieces}", hint="use 1 (nothing is split) or more")
        states = self._states(problem)
        found: list[_Candidate] = []
        for n, state in enumerate(states):
            problem.progress("trying decisions", n, len(states), "")
            found += _candidates(problem, state)
        best = min(found, key=lambda c: (c.missing, c.seconds, len(c.state.splits)))
        return finish(self, problem, best.actions, why=_why(problem, best.state, len(found)), began=began)

    def _states(self, problem: Problem) -> list[State]:
        """Budgets do not enter: so a looser one is never slower."""
        states: list[State] = []
        traces = SplitTraces(problem.trace)
        for most in dict.fromkeys((1, self.pieces)):
            search = SplitSearch(problem, most, traces)
            if most > 1 and not search.regions:
                break
            states += [*chosen_prefixes(search.states(), _GRID), *search.uniform()]
            if problem.hardware.overlap:  # where memory is short, no copy may be under way for long
                without = replace(problem, hardware=replace(problem.hardware, overlap=False))
                waiting = chosen_prefixes(SplitSearch(without, most, traces).states(), _GRID // 2)
                states += [state.waited() for state in waiting]
        return list(dict.fromkeys(states))


class _Candidate(NamedTuple):
    missing: int
    seconds: float
    actions: list[Action]
    state: State


def _candidates(problem: Problem, state: State) -> list[_Candidate]:
    """The state's actions, with more or less memory for copies that are under way."""
    found = []
    for most in _PATIENCE if state.swapped and problem.hardware.overlap else _PATIENCE[:1]:
        actions = actions_for(problem, state, most)
        outcome = outcome_or_never(problem, actions)
        found.append(_Candidate(missing_bytes(problem, outcome), outcome.seconds, actions, state))
        if outcome.seconds == inf:
            break
    return found


def actions_for(problem: Problem, state: State, most: int | None = None) -> list[Action]:
    """Pieces, programs of blocks, replays and offloads. `most`: blocks that copies may take."""
    pieces: list[Action] = list(state.pieces(problem.trace))
    step = problem.under(pieces)
    trace, triggers = step.trace, Triggers(step, most)
    held = waiting_tensors(step, state.rerun)
    programs = actions_of(step, triggers, [Decision(held[x], True) for x in state.again])
    kept = {n: p.tensors for n, p in lower(step, programs).programs.items()} if programs else {}
    apart = moved_whole(trace, state.rerun)
    swaps: list[Action] = []
    beside = triggers.parts([held[x] for x, at in state.swapped if at != WAITED])
    waited = Triggers(step, 0).parts([held[x] for x, at in state.swapped if at == WAITED])
    for (number, until, fetch), tensors in (*beside.items(), *waited.items()):
        if number in apart:
            swaps.append(triggers.offload(number, until, fetch, tensors, by_program=False))
            continue
        swap = LayerSwap.of(trace, trace.blocks[number], only={t.tensor for t in tensors}, kept=kept)
        swaps += [replace(swap, until=until, fetch=fetch)] if swap.tensors(trace) else []
    reruns = [Recompute.of(trace, [trace.block(name)]) for name in state.rerun]
    return [*pieces, *reruns, *programs, *swaps]


def _why(problem: Problem, state: State, tried: int) -> list[str]:
    if state == State():
        return [NOTHING]
    step = problem.under(state.pieces(problem.trace))
    size = {x: info.nbytes for x, info in step.trace.tensors.items()}
    sizes = [sum(size[x] for x in of) for of in ([x for x, _ in state.swapped], state.again)]
    parts = [
        f"{len(state.swapped)} tensors ({format_bytes(sizes[0])}) are swapped",
        f"{len(state.again)} ({format_bytes(sizes[1])}) computed again",
        *([f"{len(state.rerun)} blocks run again"] if state.rerun else []),
        f"{len(state.splits)} modules run in pieces",
    ]
    why = [f"{', '.join(parts)}; {tried} steps were simulated"]
    return [*why, *_splits(state.pieces(problem.trace))]


def _splits(pieces: Sequence[Pieces]) -> list[str]:
    return [f"{len(p.modules)} modules in pieces of {p.rows} {p.by}, as `{p.modules[0]}`" for p in pieces]
