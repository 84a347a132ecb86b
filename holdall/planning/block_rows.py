"""The plan's decision for each block, as rows for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdall.actions.keep import Keep
from holdall.cost.link import copy_seconds
from holdall.simulator.lower import blocks_of, lower
from holdall.types import Action, Block, BlockRow, Copy, Phase, Problem, Run, Schedule, Trace
from holdall.types.trace import TensorId


def block_rows(problem: Problem, actions: Iterable[Action]) -> list[BlockRow]:
    """One row per block: decision, bytes held on the device for backward with and without the plan, seconds."""
    schedule = lower(problem, actions)
    trace = schedule.trace
    decided: dict[str, list[Action]] = {}
    for action in sorted(actions, key=lambda a: a.rank):
        for name in blocks_of(action):
            decided.setdefault(name, []).append(action)
    moved = {x for steps in schedule.after.values() for s in steps if isinstance(s, Copy) for x in s.tensors}
    leaving = (s for steps in schedule.after.values() for s in steps if isinstance(s, Copy) and s.src == problem.home)
    gone = {x: s.dst for s in leaving for x in s.tensors}
    again: dict[int, float] = {}
    for steps in schedule.after.values():
        for step in steps:
            if isinstance(step, Run) and step.again:
                again[step.op] = again.get(step.op, 0.0) + step.seconds
    needed = _read_in_backward(schedule)
    by_module: dict[str, float] = {}
    for op in trace.ops:
        by_module[op.site.module] = by_module.get(op.site.module, 0.0) + op.seconds
    rows = []
    for block in trace.blocks:
        saved = {trace.saves[i].tensor for i in block.saves}
        own = {x for x in saved | set(block.inputs) if trace.tensors[x].born >= 0 and x in saved}
        forward = {x for x in own if block.first <= trace.tensors[x].born <= block.last} | {x for x in own if x in block.inputs}
        replayed = block.id in schedule.replays
        codes = _codes(schedule, block)
        treated = [a for a in decided.get(block.name, decided.get("", [])) if not isinstance(a, Keep)]
        by_op = codes or any(a.by_ops for a in treated)
        if by_op:
            held = (forward & needed) - moved
        else:
            held = {x for x in forward if x not in moved and (not replayed or x in block.inputs or _kept(schedule, x))}
        seconds = sum(t for module, t in by_module.items() if module == block.module or module.startswith(f"{block.module}."))
        extra = sum(again.get(op, 0.0) for op in range(block.first, block.last + 1))
        if problem.hardware.far is not None and not problem.hardware.overlap:
            for tier, size in _sizes(trace, forward & moved, gone, problem.other()).items():
                ways = ((problem.home, tier), (tier, problem.home))
                extra += sum(copy_seconds(size, problem.hardware, *way) for way in ways if size)
        rows.append(
            BlockRow(
                module=block.name,
                decision=" + ".join(_called(a) for a in treated) or Keep.name,
                nbytes_held=sum(trace.tensors[x].nbytes for x in held) + codes,
                nbytes_plain=sum(trace.tensors[x].nbytes for x in forward),
                seconds=seconds + extra,
                extra_seconds=extra,
            )
        )
    return rows


def _called(action: Action) -> str:
    """The action's name, with its tier if it has one."""
    named = sorted(tier for tier in action.tiers if tier)
    return f"{action.name} to {', '.join(named)}" if named else action.name


def _sizes(trace: Trace, tensors: Iterable[TensorId], gone: Mapping[TensorId, str], near: str) -> dict[str, int]:
    """Bytes of these tensors by the tier that each is copied to."""
    found: dict[str, int] = {}
    for x in tensors:
        tier = gone.get(x, near)
        found[tier] = found.get(tier, 0) + trace.tensors[x].nbytes
    return found


def _codes(schedule: Schedule, block: Block) -> int:
    """Bytes of the block's compressed tensors."""
    runs = [s for s in schedule.after.get(block.last, ()) if isinstance(s, Run) and s.name.startswith("encode ")]
    return sum(schedule.info(x).nbytes for run in runs for x in run.writes)


def _read_in_backward(schedule: Schedule) -> set[int]:
    """Tensors that backward, or a replay in it, reads."""
    first = next((op.id for op in schedule.trace.ops if op.site.phase is Phase.BACKWARD), len(schedule.trace.ops))
    runs = [schedule.run(k) for k in range(first, len(schedule.trace.ops))]
    runs += [s for k, steps in schedule.after.items() if k >= first - 1 for s in steps if isinstance(s, Run)]
    return {x for run in runs for x in run.reads}


def _kept(schedule: Schedule, tensor: int) -> bool:
    """A result that a recomputed block keeps: autograd's references to it were not taken away."""
    return tensor not in schedule.holds or any(
        (s.released, 0) in schedule.holds[tensor] for s in schedule.trace.saves_of(tensor)
    )
