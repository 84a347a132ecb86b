"""Warm starts for the op-level solvers: what a plan of recomputation runs, in the nodes of a graph.

A plan that drops blocks and runs them again, or runs them by programs, is one program of the whole model's graph. A solver that
begins with it returns nothing worse.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdall.actions.reschedule import region
from holdall.actions.reschedule.dag import Program
from holdall.actions.reschedule.op_graph import OpGraph
from holdall.planning.finish import with_traced
from holdall.planning.stages import bits, in_stages
from holdall.simulator.lower import lower
from holdall.types import Action, Problem, Run


def program_of(problem: Problem, graph: OpGraph, actions: Iterable[Action]) -> Program:
    """The runs of a plan in stages: before each first run of a node, the nodes that the plan runs again there.

    A node is run again if one of its ops is; what nobody reads is left out, and what a node then misses is carried.
    """
    ops, _ = region(graph.trace, graph.block)
    node = {ops[n].id: i for i, part in enumerate(graph.parts) for n in part}
    program: list[int] = []
    first, again = 0, 0  # the next node that has not run, and the set of those to run again before it
    for step in lower(problem, with_traced(problem, list(actions))).steps():
        if not isinstance(step, Run) or step.op not in node:
            continue
        i = node[step.op]
        if step.again:
            again |= 1 << i
        elif i >= first:
            program += [*bits(again), *range(first, i + 1)]  # nodes without ops lie between
            first, again = i + 1, 0
    program += range(first, len(graph.dag))
    return in_stages(graph.dag, tuple(program)).program
