"""What planners that solve op by op have in common: the graph to solve, the budget that is left for it, and a second look.

Where the whole model is small enough and nothing stands in its way, it is one graph and the solver sees everything at once.
Otherwise each kind of block is solved once for a falling share of the bytes that it would hold, all blocks alike, until the
step fits. Either way the simulator has the last word: what it finds too large is solved again in less memory.
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
from holdall.types import Action, Plan, Planner, Problem
from holdall.units import format_bytes, format_seconds

_AGAIN = 6  # times the solver is asked again in less memory
_FIRST = 0.7  # of the time that is left, for one answer: the next may have to fit less memory
_SHARES = (0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0)  # of the bytes that a block holds, one after the other
_SCOPES = ("auto", "model", "blocks")


class Solver(Protocol):
    def __call__(self, dag: Dag, budget: int, *, loss: int, saved_budget: int | None, seconds: float) -> Answer:
        """The best program that is found in so many seconds."""
        ...


def plan_by_ops(planner: Planner, problem: Problem, solver: Solver, *, scope: str, nodes: int, time_limit: float) -> Plan:
    """The plan of a solver. `scope`: "model", "blocks", or "auto" (the model if it has at most `nodes`).

    Where the model cannot be one graph, the plan says why, and blocks are solved. `time_limit`: seconds for each graph.
    """
    began = time.perf_counter()
    if scope not in _SCOPES:
        raise unknown_name(f"scope of {planner.name}", scope, _SCOPES)
    plain = outcome_of(problem, [])
    if not over_budget(problem, plain):
        return finish(planner, problem, [], why=["everything fits: nothing is run again"], began=began)
    graph, apart = _whole(problem, scope, nodes)
    attempts = _blocks(problem, solver, time_limit) if graph is None else _model(problem, graph, solver, time_limit)
    best: tuple[list[Action], list[str]] = ([], [])
    least = plain.peak[problem.home]
    for actions, why in attempts:
        outcome = outcome_or_never(problem, actions)
        if outcome.peak[problem.home] < least:
            least, best = outcome.peak[problem.home], (actions, why)
        if not over_budget(problem, outcome):
            return finish(planner, problem, actions, why=[*apart, *why], began=began)
    return finish(planner, problem, best[0], why=[*apart, *best[1]], began=began)


def _whole(problem: Problem, scope: str, nodes: int) -> tuple[OpGraph | None, list[str]]:
    """The model as one graph, or why there is none; nothing to say where blocks were asked for."""
    whole = problem.trace.whole
    if scope == "blocks":
        return None, []
    why_not = "it was traced in parts" if whole is None else obstacle(problem.trace, whole)
    if whole is None or why_not:
        return None, [f"the model is not solved as one graph but by blocks: {why_not}"]
    graph = op_graph(problem.trace, whole)
    if scope == "model" or len(graph.dag) <= nodes:
        return graph, []
    large = f'its graph has {len(graph.dag)} nodes, more than {nodes} (`scope="model"` solves it all the same)'
    return None, [f"the model is not solved as one graph but by blocks: {large}"]


def _model(problem: Problem, graph: OpGraph, solver: Solver, time_limit: float) -> Iterator[tuple[list[Action], list[str]]]:
    """The whole model as one graph, in the memory that nothing else needs."""
    dag = graph.dag
    target = _room(problem, graph)
    until = time.perf_counter() + time_limit
    for n in range(_AGAIN):
        problem.progress("solving", n, _AGAIN, f"{len(dag)} nodes")
        left = max(until - time.perf_counter(), 0.1)
        found = solver(dag, target, loss=graph.middle, saved_budget=None, seconds=left * _FIRST)
        if found.program is None:  # how little memory would do is worth knowing
            small = squeeze(everything(dag), Limits(budget=dag.floor)).program
            yield [graph.action(small)], [f"no program fits {format_bytes(target)}"]
            return
        actions: list[Action] = [graph.action(found.program)]
        seen = replay(dag, found.program)
        again = sum(n - 1 for n in seen.executed)
        extra = found.cost - sum(dag.cost)
        yield (
            actions,
            [
                f"the model as one graph of {len(dag)} nodes: {again} runs again, {format_seconds(extra)} more",
                f"{format_bytes(target)} for activations and gradients; {_verdict(found)}",
            ],
        )
        target -= max(1, _excess(problem, actions)) + n * target // 200  # in growing steps, or it takes too many


def _room(problem: Problem, graph: OpGraph) -> int:
    """The budget in the graph's own bytes: without what is there before, and with what its merged ops seem to hold too much."""
    curve = memory_curve(problem, [])
    before = curve.before[graph.block.first]
    last = max(op.id for op in problem.trace.backward_of(graph.block.module))
    seen = max(curve.high[graph.block.first : last + 1]) - before
    too_much = max(0, replay(graph.dag, graph.dag.once).peak - seen)
    return problem.limit(problem.home) - before + too_much


def _excess(problem: Problem, actions: list[Action]) -> int:
    return max(over_budget(problem, outcome_or_never(problem, actions)).values(), default=0)


def _blocks(problem: Problem, solver: Solver, time_limit: float) -> Iterator[tuple[list[Action], list[str]]]:
    """Every kind of block by itself, for less and less of what it would hold."""
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
        yield actions, [f"{len(graphs)} kinds of blocks solved for {share:.0%} of what they hold", _verdict(worst)]


def _total(dag: Dag) -> int:
    return sum(dag.size) + max(dag.extra)


def _verdict(found: Answer) -> str:
    if found.status == "optimal":
        return "solved to the end"
    return f"best found in {format_seconds(found.seconds)}, at most {found.gap:.1%} from the best there is"
