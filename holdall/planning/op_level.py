"""Shared by planners that solve op by op: the graph to solve, the budget left for it, and repeated solving.

Each kind of block is solved once for a falling share of the bytes that it would hold, all blocks alike, until the step fits.
Where the whole model is small enough and nothing stands in its way, it is one graph too, and the solver sees everything at
once. It begins with the plans of quick planners and of the blocks, as programs of that graph (`warm_start.py`), and with what
single steps make of them, so what it returns is never worse than any of them, although a large graph is seldom solved to the
end. The simulator has the last word: what it finds too large is solved again in less memory. Single steps take little time, so
they are the first to find how much memory fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, obstacle, program_for
from holdall.actions.reschedule.dag import Answer, Dag, Program, replay
from holdall.actions.reschedule.op_graph import OpGraph, op_graph
from holdall.errors import HoldallError, unknown_name
from holdall.planning.finish import finish, outcome_of, outcome_or_never, over_budget
from holdall.planning.menus import kind_of
from holdall.planning.stages import Limits, everything, greedy, in_stages, squeeze
from holdall.planning.warm_start import program_of
from holdall.simulator.curve import memory_curve
from holdall.types import Action, Outcome, Plan, Planner, Problem
from holdall.units import format_bytes, format_seconds

Attempt = tuple[list[Action], list[str]]  # with what to say about them
Quick = Callable[[Problem, float], Iterable[Planner]]

_STARTS = 0.3  # at most, of the time, for quick planners where the whole model is solved after them
_BLOCKS = 0.15  # the same for its blocks
_STEPS = 0.15  # and for single steps from their plans
_AGAIN = 6  # times the solver is asked again in less memory
_FIRST = 0.7  # of the time that is left, for one answer: the next may have to fit less memory
_SHARES = (0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0)  # of the bytes that a block holds, one after the other
_SCOPES = ("auto", "model", "blocks")


class Solver(Protocol):
    def __call__(
        self, dag: Dag, budget: int, *, loss: int, saved_budget: int | None, seconds: float, starts: Sequence[Program]
    ) -> Answer:
        """The best program that is found in so many seconds, no worse than those of `starts` that fit."""
        ...


def plan_by_ops(
    planner: Planner, problem: Problem, solver: Solver, *, scope: str, nodes: int, time_limit: float, quick: Quick
) -> Plan:
    """The plan of a solver. `scope`: "model", "blocks", or "auto" (the model if it has at most `nodes`).

    Where the model cannot be one graph, the plan says why, and blocks are solved. `time_limit`: seconds for each graph.
    `quick`: planners that take about so many seconds, to begin with.
    """
    began = time.perf_counter()
    if scope not in _SCOPES:
        raise unknown_name(f"scope of {planner.name}", scope, _SCOPES)
    plain = outcome_of(problem, [])
    if not over_budget(problem, plain):
        return finish(planner, problem, [], why=["plain training fits the budget: nothing is recomputed"], began=began)
    graph, said = _whole(problem, scope, nodes)
    tried = _Tried(problem, plain)
    if graph is None:
        tried.first_fit(_blocks(problem, solver, time_limit))
    else:
        if scope == "auto":
            tried.first_fit(_blocks(problem, solver, _BLOCKS * time_limit))
        plans = [found.actions for found in tried.fits] + _quick_plans(problem, quick(problem, _STARTS * time_limit))
        programs = dict.fromkeys(program_of(problem, graph, plan) for plan in plans)
        said_of_start = "what the solver began with; it found nothing faster in its time"
        starts = [p for p in programs if tried.first_fit([_as_one(graph, p, said_of_start)])]
        target, stepped = _by_steps(problem, graph, starts, _STEPS * time_limit)
        starts += [p for p in stepped if tried.first_fit([_as_one(graph, p, said_of_start)])]
        tried.first_fit(_model(problem, graph, solver, starts, target, began + time_limit - time.perf_counter()))
    best = tried.best()
    return finish(planner, problem, best.actions, why=[*said, *best.why], began=began)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    outcome: Outcome
    actions: list[Action]
    why: list[str]


class _Tried:
    """What was tried: the plans that fit, and the one that needs least memory where none does."""

    def __init__(self, problem: Problem, plain: Outcome) -> None:
        self._problem = problem
        self._smallest = _Candidate(outcome=plain, actions=[], why=[])
        self.fits: list[_Candidate] = []

    def first_fit(self, attempts: Iterable[Attempt]) -> bool:
        """Try one after the other until one fits; whether one does."""
        home = self._problem.home
        for actions, why in attempts:
            made = _Candidate(outcome=outcome_or_never(self._problem, actions), actions=actions, why=why)
            if made.outcome.peak[home] < self._smallest.outcome.peak[home]:
                self._smallest = made
            if not over_budget(self._problem, made.outcome):
                self.fits.append(made)
                return True
        return False

    def best(self) -> _Candidate:
        return min(self.fits, key=lambda c: c.outcome.seconds, default=self._smallest)


def _quick_plans(problem: Problem, planners: Iterable[Planner]) -> list[list[Action]]:
    """The plans of quick planners that fit, by recomputation alone."""
    alone = replace(problem, allow=frozenset({Recompute.name}))
    found = []
    for planner in planners:
        with suppress(HoldallError):  # it has no plan for this model or this budget
            found.append(list(planner(alone).actions))
    return found


def _whole(problem: Problem, scope: str, nodes: int) -> tuple[OpGraph | None, list[str]]:
    """The model as one graph, or the reason why not; no reason if the user asked for blocks."""
    whole = problem.trace.whole
    if scope == "blocks":
        return None, []
    why_not = "it was traced in parts" if whole is None else obstacle(problem.trace, whole)
    if whole is None or why_not:
        return None, [f"solved block by block, not as one graph: {why_not}"]
    graph = op_graph(problem.trace, whole)
    if scope == "model" or len(graph.dag) <= nodes:
        return graph, []
    large = f'its graph has {len(graph.dag)} nodes, more than {nodes} (`scope="model"` solves it anyway)'
    return None, [f"solved block by block, not as one graph: {large}"]


def _by_steps(problem: Problem, graph: OpGraph, starts: Sequence[Program], time_limit: float) -> tuple[int, list[Program]]:
    """(bytes of the graph that fit by the simulator, programs that single steps from `starts` make for them)."""
    dag = graph.dag
    target = max(_room(problem, graph), *(replay(dag, start).peak for start in starts), 0)  # as these fit, so much does
    until = time.perf_counter() + time_limit
    less, found = target, []
    for n in range(_AGAIN):
        staged = greedy(dag, Limits(budget=less), starts=starts, until=until)
        if staged is None or not _can_be_run(graph, staged.program):
            break
        found.append(staged.program)
        excess = _excess(problem, [graph.action(staged.program)])
        if not excess:
            return less, found
        if time.perf_counter() > until:
            break
        less -= excess + n * less // 200  # in growing steps, or it takes too many
    return target, found


def _model(
    problem: Problem, graph: OpGraph, solver: Solver, starts: Sequence[Program], target: int, time_limit: float
) -> Iterator[Attempt]:
    """The whole model as one graph in so many bytes. `starts`: programs that fit by the simulator."""
    dag = graph.dag
    until = time.perf_counter() + time_limit
    for n in range(_AGAIN):
        problem.progress("solving", n, _AGAIN, f"{len(dag)} nodes")
        left = max(until - time.perf_counter(), 0.1)
        found = solver(dag, target, loss=graph.middle, saved_budget=None, seconds=left * _FIRST, starts=starts)
        if found.program is None and starts:
            return
        if found.program is None:  # how little memory would do is worth knowing
            small = squeeze(everything(dag), Limits(budget=dag.floor)).program
            why = "no program fits" if found.status == "infeasible" else "the time limit was reached without a program for"
            yield [graph.action(small)], [f"{why} {format_bytes(target)}"]
            return
        program = in_stages(dag, found.program).program  # without runs that nobody reads
        if not _can_be_run(graph, program):
            return
        made = _as_one(graph, program, f"{format_bytes(target)} for activations and gradients; {_verdict(found)}")
        yield made
        target -= max(1, _excess(problem, made[0])) + n * target // 200  # in growing steps, or it takes too many


def _can_be_run(graph: OpGraph, program: Program) -> bool:
    """Whether each half ends with the first run of an op: what is run again is put right before the next first run."""
    with_ops = [(place, i) for place, i in enumerate(program) if graph.parts[i]]
    forward = [(place, i) for place, i in with_ops if place < program.index(graph.middle)]
    return all(program.index(i) == place for place, i in (forward[-1], with_ops[-1]))


def _as_one(graph: OpGraph, program: Program, verdict: str) -> Attempt:
    """The model run by one program."""
    seen = replay(graph.dag, program)
    again, extra = sum(n - 1 for n in seen.executed), format_seconds(seen.seconds - sum(graph.dag.cost))
    return [graph.action(program)], [
        f"the model as one graph of {len(graph.dag)} nodes: {again} runs again, {extra} more",
        verdict,
    ]


def _room(problem: Problem, graph: OpGraph) -> int:
    """The budget in the graph's own bytes: without the bytes in use before, plus what merged ops overcount."""
    curve = memory_curve(problem, [])
    before = curve.before[graph.block.first]
    last = max(op.id for op in problem.trace.backward_of(graph.block.module))
    seen = max(curve.high[graph.block.first : last + 1]) - before
    too_much = max(0, replay(graph.dag, graph.dag.once).peak - seen)
    return problem.limit(problem.home) - before + too_much


def _excess(problem: Problem, actions: list[Action]) -> int:
    return max(over_budget(problem, outcome_or_never(problem, actions)).values(), default=0)


def _blocks(problem: Problem, solver: Solver, time_limit: float) -> Iterator[Attempt]:
    """Every kind of block by itself, for less and less of the bytes that it would hold."""
    trace = problem.trace
    chain = [b for b in trace.blocks if b.saves and b.backward is not None and not obstacle(trace, b)]
    graphs: dict[int, OpGraph] = {}
    for block in chain:
        graphs.setdefault(kind_of(block), op_graph(trace, block))
    for n, share in enumerate(_SHARES):
        problem.progress("solving", n, len(_SHARES), f"{len(graphs)} kinds of blocks")
        orders: dict[int, Reschedule] = {}
        gaps = []
        for kind, graph in graphs.items():
            saved = int(graph.kept * share)
            seconds = time_limit / len(_SHARES)
            found = solver(graph.dag, 2 * _total(graph.dag), loss=graph.middle, saved_budget=saved, seconds=seconds, starts=())
            if found.program is not None:
                orders[kind] = graph.action(found.program)
                gaps.append(found)
        if not orders:
            return
        actions = [
            action
            for b in chain
            if kind_of(b) in orders
            for action in program_for(trace, b, orders[kind_of(b)].backward, orders[kind_of(b)].forward)
        ]
        worst = max(gaps, key=lambda a: a.gap)
        yield actions, [f"{len(graphs)} kinds of blocks solved for {share:.0%} of the bytes they hold", _verdict(worst)]


def _total(dag: Dag) -> int:
    return sum(dag.size) + max(dag.extra)


def _verdict(found: Answer) -> str:
    if found.status == "optimal":
        return "proven optimal"
    return f"best found in {format_seconds(found.seconds)}, at most {found.gap:.1%} above the optimum"
