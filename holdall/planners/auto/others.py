"""More candidates for `auto` where blocks are too small for its own search: the whole model as one program, and other members.

The menus choose for each block, and what a block keeps or recomputes begins and ends with it. That does little where a block is
a layer or two, as in VGG: its result is its neighbour's input, and computing it again takes as long as it took. Programs of
the whole model, and members that swap single tensors across blocks, do better there. Both take long for large models, whose
blocks are large too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdall.errors import HoldallError, Infeasible
from holdall.planners.superneurons import Superneurons
from holdall.planners.tsplit import Tsplit
from holdall.planning.op_level import by_single_steps
from holdall.types import Action, Phase, Plan, Planner, Problem
from holdall.types.plan import silent

SMALL = 16  # ops of a block's forward, on average, and
NODES = 300  # ops of the step, up to which these are asked
MEMBERS: tuple[Planner, ...] = (Tsplit(pieces=1), Superneurons())  # `pieces` change the last bits, so they are not tried here


def asks_others(problem: Problem) -> bool:
    """Are the blocks so small that plans across blocks may be faster?"""
    trace = problem.trace
    forward = sum(op.site.phase is Phase.FORWARD for op in trace.ops)
    return len(trace.ops) <= NODES and forward <= SMALL * len(trace.blocks)


def plans_of_others(problem: Problem) -> Iterator[tuple[str, tuple[Action, ...]]]:
    """(label, actions): within the budget, or in the least memory of a member."""
    quietly = replace(problem, progress=silent)
    for program in by_single_steps(quietly, nodes=NODES):
        yield "the model as one program", tuple(program)
    for member in MEMBERS:
        try:
            yield f"the plan of {member.name}", tuple(_planned(member, quietly).actions)
        except HoldallError:
            continue


def _planned(member: Planner, problem: Problem) -> Plan:
    try:
        return member(problem)
    except Infeasible as refused:
        if refused.smallest is None:
            raise
        return member(replace(problem, budget={**problem.budget, problem.home: refused.smallest}))
