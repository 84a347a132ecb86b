"""Shared by planners that solve op by op: the graph to solve, the budget left for it, and repeated solving.

Each kind of block is solved once for a falling share of the bytes that it would hold, all blocks alike, until the step fits.
Where the whole model is small enough and has no obstacle, it is also solved as one graph; the faster plan is kept, since a
large graph is seldom solved to optimality. In both cases the simulator decides: a plan that it finds too large is solved again
with less memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from holdall.actions.reschedule import Reschedule, obstacle, program_for
from holdall.actions.reschedule.dag import Answer, Dag, replay
from holdall.actions.reschedule.op_graph import OpGraph, op_graph
from holdall.errors import unknown_name
from holdall.planning.finish import finish, outcome_of, outcome_or_never, over_budget
from holdall.planning.menus import kind_of
from holdall.planning.stages import Limits, everything, squeeze
from holdall.simulator.curve import memory_curve
from holdall.types import Action, Outcome, Plan, Planner, Problem
from holdall.units import format_bytes, format_seconds

Attempt = tuple[list[Action], list[str]]  # with the reasons to report

_BLOCKS = 0.5  # at most, of the time, where the whole model is solved afterwards
_AGAIN = 6  # times the solver may run again with less memory
_FIRST = 0.7  # of the time left, for one answer: the next may have to fit less memory
_SHARES = (0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0)  # of the bytes that a block holds, tried in this order
_SCOPES = ("auto", "model", "blocks")


class Solver(Protocol):
    def __call__(self, dag: Dag, budget: int, *, loss: int, saved_budget: int | None, seconds: float) -> Answer:
        """The best program found in `seconds`."""
        ...


def plan_by_ops(planner: Planner, problem: Problem, solver: Solver, *, scope: str, nodes: int, time_limit: float) -> Plan:
    """The plan of an op-level solver. `scope`: "model", "blocks", or "auto" (the model if it has at most `nodes`).

    Where the model cannot be one graph, the plan gives the reason and blocks are solved. `time_limit`: seconds for each graph.
    """
    began = time.perf_counter()
    if scope not in _SCOPES:
        raise unknown_name(f"scope of {planner.name}", scope, _SCOPES)
    plain = outcome_of(problem, [])
    if not over_budget(problem, plain):
        return finish(planner, problem, [], why=["plain training fits the budget: nothing is recomputed"], began=began)
    graph, said = _whole(problem, scope, nodes)
    small: tuple[Outcome, list[Action], list[str]] = (plain, [], [])  # the least memory, if nothing fits
    fits: list[tuple[Outcome, list[Action], list[str]]] = []
    for attempts in _ways(problem, graph, solver, scope=scope, until=began + time_limit):
        for actions, why in attempts:
            outcome = outcome_or_never(problem, actions)
            if outcome.peak[problem.home] < small[0].peak[problem.home]:
                small = outcome, actions, why
            if not over_budget(problem, outcome):
                fits.append((outcome, actions, why))
                break
    _, actions, why = min(fits, key=lambda f: f[0].seconds) if fits else small
    return finish(planner, problem, actions, why=[*said, *why], began=began)


def _ways(problem: Problem, graph: OpGraph | None, solver: Solver, *, scope: str, until: float) -> Iterator[Iterator[Attempt]]:
    """The formulations of the problem, one after the other in the time left."""
    if graph is None or scope == "auto":
        yield _blocks(problem, solver, (until - time.perf_counter()) * (1.0 if graph is None else _BLOCKS))
    if graph is not None:
        yield _model(problem, graph, solver, until - time.perf_counter())


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


def _model(problem: Problem, graph: OpGraph, solver: Solver, time_limit: float) -> Iterator[Attempt]:
    """The whole model as one graph, in the memory that is left for it."""
    dag = graph.dag
    target = _room(problem, graph)
    until = time.perf_counter() + time_limit
    for n in range(_AGAIN):
        problem.progress("solving", n, _AGAIN, f"{len(dag)} nodes")
        left = max(until - time.perf_counter(), 0.1)
        found = solver(dag, target, loss=graph.middle, saved_budget=None, seconds=left * _FIRST)
        if found.program is None:  # report how little memory would do
            small = squeeze(everything(dag), Limits(budget=dag.floor)).program
            why = "no program fits" if found.status == "infeasible" else "the time limit was reached without a program for"
            yield [graph.action(small)], [f"{why} {format_bytes(target)}"]
            return
        actions: list[Action] = [graph.action(found.program)]
        seen = replay(dag, found.program)
        again = sum(n - 1 for n in seen.executed)
        extra = found.cost - sum(dag.cost)
        yield (
            actions,
            [
                f"the model as one graph of {len(dag)} nodes: {again} ops recomputed, {format_seconds(extra)} more per step",
                f"{format_bytes(target)} for activations and gradients; {_verdict(found)}",
            ],
        )
        target -= max(1, _excess(problem, actions)) + n * target // 200  # in growing steps, to limit their number


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
            found = solver(graph.dag, 2 * _total(graph.dag), loss=graph.middle, saved_budget=saved, seconds=seconds)
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
