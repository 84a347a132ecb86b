"""AutoTM: an integer program decides, for every tensor, in which of two memories it is between its uses.

Hildebrand et al., ASPLOS 2020; the program is in `flows.py`. Nodes are the forwards and backwards of blocks, and a tensor is
what a block holds for its backward, which leaves and comes back at most once in a step.

- `static`: nothing moves. `synchronous`: copies are made after the block's forward and before its backward, and nothing runs
  beside them. `asynchronous`: they may run beside other blocks, up to 15 nodes away, and end with that block.
- The program knows bytes, not addresses. So its plan is simulated with the device's allocator; where that does not fit, the
  limits of the nodes around are lowered by up to a tenth, and the program is solved again (AutoTM's loop against
  fragmentation).

Not here: kernels that compute on operands in the slow memory, which a GPU cannot (AutoTM's version for Optane memory), and the
choice of cuDNN's algorithm.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from holdall.actions.layer_swap import LayerSwap
from holdall.cost.link import link_rate
from holdall.errors import unknown_name
from holdall.planners.autotm.flows import MODES, RADIUS, FlowAnswer, FlowStep, Mode, Movable, optimum
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.simulator.curve import memory_curve
from holdall.types import Action, Block, Outcome, Phase, Plan, Problem, Trace
from holdall.units import format_seconds

_AROUND = 10  # nodes before and after one that does not fit whose limits are lowered, too
_LEAST = 0.9  # of a limit that one round leaves
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True)
class Autotm:
    mode: str = "asynchronous"  # static, synchronous or asynchronous
    radius: int = RADIUS  # nodes from a use at which tensors may move beside the computation
    time_limit: float = 30.0  # seconds of the solver, in each round

    name: ClassVar[str] = "autotm"
    paper: ClassVar[str] = "Hildebrand et al., ASPLOS 2020"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.mode not in MODES:
            raise unknown_name("mode of autotm", self.mode, MODES)
        outcome = outcome_or_never(problem, [])
        can_move = self.mode != "static" and problem.permits(LayerSwap) and problem.hardware.far is not None
        if not over_budget(problem, outcome) or not can_move:
            return finish(self, problem, [], began=began)
        graph = graph_of(problem)
        answer, actions = self._search(problem, graph)
        why = ["the program has no solution: every block that can is offloaded"]
        if answer is not None:
            why = [f"{len(actions)} blocks are offloaded; by the program a step takes {format_seconds(answer.seconds)}"]
        return finish(self, problem, actions, why=why, began=began)

    def _search(self, problem: Problem, graph: BlockGraph) -> tuple[FlowAnswer | None, list[Action]]:
        """The program's plan, solved with lower limits until it fits; if there is none, the one that needs least."""
        mode: Mode = "asynchronous" if self.mode == "asynchronous" and problem.hardware.overlap else "synchronous"
        limits: Sequence[float] = [problem.limit(problem.home)] * len(graph.spans)
        for n in range(_ROUNDS):
            problem.progress("solving", n, _ROUNDS, "")
            answer = optimum(graph.within(limits), mode, radius=self.radius, time_limit=self.time_limit)
            if answer.seconds == float("inf"):
                break
            actions = graph.actions(answer)
            outcome = outcome_or_never(problem, actions)
            if not over_budget(problem, outcome):
                return answer, actions
            limits = lowered(problem, graph, limits, actions, outcome)
        return None, graph.all_out()


def lowered(
    problem: Problem, graph: BlockGraph, limits: Sequence[float], actions: Sequence[Action], outcome: Outcome
) -> list[float]:
    """Lower the nodes' limits of all bytes around those that exceed the budget; all limits, if only the allocator does."""
    budget = problem.limit(problem.home)
    highs = highs_of(graph.spans, memory_curve(problem, actions).high)
    bad = [k for k, high in enumerate(highs) if high > budget] or list(range(len(limits)))
    worst = max(outcome.peak[problem.home], outcome.reserved or 0)
    share = max(_LEAST, 1 - (worst / budget - 1) / 2) if budget else _LEAST
    near = {k for n in bad for k in range(n - _AROUND, n + _AROUND + 1)}
    return [limit * share if k in near else limit for k, limit in enumerate(limits)]


class _Span(NamedTuple):
    """A node: the forward or the backward of a block, with the ops up to the next node."""

    block: Block
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    """The nodes of a step, forward then backward, and the blocks whose tensors may move."""

    spans: Sequence[_Span]
    swaps: Sequence[LayerSwap]  # one for each tensor of the program
    fixed: Sequence[float]  # bytes at each node that the program does not decide about
    step: FlowStep  # its limits are not set

    def within(self, limits: Sequence[float]) -> FlowStep:
        """The program's step with these limits of all bytes."""
        return replace(self.step, limits=[limit - fixed for limit, fixed in zip(limits, self.fixed, strict=True)])

    def actions(self, answer: FlowAnswer) -> list[Action]:
        """The actions of the program's moves."""
        made: dict[int, LayerSwap] = {}
        for move in answer.moves:
            users = self.step.tensors[move.tensor].users
            action = made.get(move.tensor, _at_once(self.swaps[move.tensor]))
            if move.beside and move.way == "write":
                action = replace(action, begin=self.spans[move.node - 1].block.name, until=self.spans[move.node].block.name)
            elif move.beside and move.node + 1 <= users[-1]:
                action = replace(action, fetch=self.spans[move.node].block.name, arrive=self.spans[move.node + 1].block.name)
            made[move.tensor] = action
        return [made[n] for n in sorted(made)]

    def all_out(self) -> list[Action]:
        return [_at_once(swap) for swap in self.swaps]


def highs_of(spans: Sequence[_Span], high: Sequence[int]) -> list[int]:
    """The most bytes on the device during each node, from those during each op."""
    return [max(high[s.first : s.last + 1], default=0) for s in spans]


def _at_once(swap: LayerSwap) -> LayerSwap:
    """Copied when the block's forward is over, and fetched when backward needs it; both waited for."""
    return replace(swap, begin=swap.block, until=swap.block)


def graph_of(problem: Problem) -> BlockGraph:
    """The step of a problem as nodes and tensors."""
    trace = problem.trace
    spans = spans_of(trace)
    begins = [s.first for s in spans]
    swaps, tensors = [], []
    for n, span in enumerate(spans[: len(spans) // 2 - 1]):  # the last block stays
        swap = LayerSwap.of(trace, span.block)
        moved = swap.tensors(trace)
        asked = [s.unpacked for x in moved for s in trace.saves_of(x) if s.unpacked is not None]
        if asked:
            swaps.append(swap)
            needed = bisect_right(begins, min(asked) + 1) - 1
            tensors.append(Movable(size=sum(trace.tensors[x].nbytes for x in moved), users=(n, needed)))
    near = problem.other()
    high = memory_curve(problem, []).high
    movable = [sum(t.size for t in tensors if t.users[0] <= k <= t.users[-1]) for k in range(len(spans))]
    return BlockGraph(
        spans=spans,
        swaps=swaps,
        fixed=[top - there for top, there in zip(highs_of(spans, high), movable, strict=True)],
        step=FlowStep(
            seconds=[sum(op.seconds for op in trace.ops[s.first : s.last + 1]) for s in spans],
            limits=(),
            tensors=tensors,
            write=link_rate(problem.hardware, problem.home, near),
            read=link_rate(problem.hardware, near, problem.home),
            room=problem.limit(near),
            turn=len(spans) // 2,
        ),
    )


def spans_of(trace: Trace) -> list[_Span]:
    """Forward nodes in order, then backward nodes; a block whose backward is out of order is part of its neighbours."""
    blocks: list[Block] = []
    for block in trace.blocks:
        if block.backward is not None and block.saves and (not blocks or block.backward < (blocks[-1].backward or 0)):
            blocks.append(block)
    if not blocks:
        return []
    turn = (blocks[-1].backward or 0) + 1
    end = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
    firsts = [0, *(b.first for b in blocks[1:]), *((b.backward or 0) + 1 for b in reversed(blocks))]
    lasts = [*(k - 1 for k in firsts[1:]), end - 1]
    assert firsts[len(blocks)] == turn
    return [_Span(b, first, last) for b, first, last in zip([*blocks, *reversed(blocks)], firsts, lasts, strict=True)]
