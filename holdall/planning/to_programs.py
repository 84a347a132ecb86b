"""A plan whose blocks all run by programs, so that every block can be compiled.

The plan's decisions stay: blocks without an action, and blocks that are only offloaded, recompute nothing; blocks that are
recomputed whole recompute everything; programs are unchanged. Blocks that cannot run op by op, and blocks with other actions,
stay as they are.

Where only activations are planned, and the budget can be kept without offloading, that is done instead: fused kernels recompute
cheaply what a copy would fetch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.errors import HoldallError
from holdall.planning.finish import finish
from holdall.registry import build_member
from holdall.simulator.lower import blocks_of
from holdall.types import Action, Block, Plan, Problem, Trace
from holdall.types.program import lazily


def by_programs(problem: Problem, plan: Plan) -> Plan:
    """The plan with as many blocks by programs as fit its budget: all, or only recomputed ones, or the plan unchanged."""
    if not problem.permits(Recompute):
        return plan
    planner = build_member("planners", plan.planner, dict(plan.options), f"planner {plan.planner}")
    plan = _without_offload(planner, problem, plan)
    trace = problem.under(plan.actions).trace
    again = _recomputed(trace, plan)
    for actions in ([*again, *_kept(trace, again)], again):
        try:
            return finish(planner, problem, actions, why=[*plan.why, "its blocks run by programs, to be compiled"])
        except HoldallError:  # a program holds its parameters' gradients to its end, which may exceed the budget
            continue
    return plan


def _without_offload(planner: Any, problem: Problem, plan: Plan) -> Plan:
    if not any(isinstance(a, Offload) for a in plan.actions) or any(isinstance(a, Place) for a in plan.actions):
        return plan
    try:
        made: Plan = planner(replace(problem, allow=problem.allow - {Offload.name}))
    except HoldallError:
        return plan
    return made


def _recomputed(trace: Trace, plan: Plan) -> list[Action]:
    found: list[Action] = []
    for action in plan.actions:
        blocks = [trace.block(name) for name in blocks_of(action)] if isinstance(action, Recompute) else []
        is_whole = isinstance(action, Recompute) and not (action.keep or action.only or action.inner or action.programs)
        if is_whole and len(blocks) == 1 and _is_able(trace, blocks[0]):
            ops, count = region(trace, blocks[0])
            found.append(Reschedule.of(trace, blocks[0], lazily(effects(ops), count)))
        else:
            found.append(action)
    return found


def _kept(trace: Trace, actions: list[Action]) -> list[Action]:
    """Blocks without an action, or offloaded whole, as programs that recompute nothing."""
    treated = {name for a in actions if not isinstance(a, Offload) or a.saves is not None for name in blocks_of(a)}
    found: list[Action] = []
    for block in trace.blocks:
        if block.name not in treated and _is_able(trace, block):
            ops, count = region(trace, block)
            found.append(Reschedule.of(trace, block, range(count, len(ops))))
    return found


def _is_able(trace: Trace, block: Block) -> bool:
    return bool(block.module and block.saves and block.backward is not None) and not obstacle(trace, block)
