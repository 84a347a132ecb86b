"""Gradient accumulation: simulates the last backward of a step, with the gradients of the earlier ones.

A trace has one backward per step, whose gradients become the parameters' own. With several, the first one's gradients stay, and
each later gradient is added to them when it is complete and then freed. So the last backward needs most memory, and is the step
that is counted. Where torch's engine sums whole gradients over ranks, it holds what it has summed until the backward is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdall.types import Kind, Phase, Problem, Schedule, Trace
from holdall.types.trace import TensorId

_SUMMED_WHOLE = {"ddp", "zero1"}


def accumulated(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with earlier gradients present from the start, and with updates that read their sums."""
    trace = problem.trace
    grads = [x for x, t in trace.tensors.items() if t.kind is Kind.GRAD and t.born >= 0]
    if problem.accumulate < 2 or not grads:
        return schedule
    schedule = schedule.copy()
    steps = [op.id for op in trace.ops if op.site.phase is Phase.STEP]
    end = (steps[0] if steps else len(trace.ops)) - 1
    over = trace.node_ends
    sums: dict[TensorId, TensorId] = {}
    stays = _held_by_engine(trace)
    for x in grads:
        held = schedule.held(x)
        sums[x] = schedule.add(trace.tensors[x], name=f"{trace.tensors[x].name} so far", born=-1)
        schedule.holds[sums[x]] = held
        made = max((k for k in trace.uses(x) if k <= end), default=trace.tensors[x].born)
        schedule.holds[x] = [(end if x in stays else over.get(made, made), 0)]
    for op in steps:
        run = schedule.run(op)
        if sums.keys() & {*run.reads, *run.mutates}:
            schedule.runs[op] = replace(run, reads=_swapped(run.reads, sums), mutates=_swapped(run.mutates, sums))
    return schedule


def _held_by_engine(trace: Trace) -> set[TensorId]:
    shards = trace.about.shards
    if shards is None or not {*shards.way.split("+")} & _SUMMED_WHOLE:
        return set()
    ops = [trace.ops[c.op] for c in shards.collectives if c.kind == "all_reduce"]
    return {x for op in ops if op.site.phase is Phase.BACKWARD for x in (*op.reads, *op.mutates, *op.writes)}


def _swapped(tensors: Iterable[TensorId], sums: dict[TensorId, TensorId]) -> tuple[TensorId, ...]:
    return tuple(sums.get(x, x) for x in tensors)
