"""Actions -> schedule -> the full list of steps, with every free derived."""

from __future__ import annotations

from collections.abc import Iterable

from holdall.errors import InvalidInput
from holdall.simulator.accumulate import accumulated
from holdall.types import Action, Copy, Drop, Problem, Run, Schedule, Step, Wait
from holdall.types.trace import TensorId


def lower(problem: Problem, actions: Iterable[Action]) -> Schedule:
    """The trace's schedule rewritten by the actions, each in its rank's turn."""
    schedule = Schedule(trace=problem.trace, home=problem.home)
    ordered = sorted(actions, key=lambda a: a.rank)
    _once_per_block(ordered)
    if not any(action.name == "place" for action in ordered):  # which says itself where gradients are added up
        schedule = accumulated(schedule, problem)
    for action in ordered:
        schedule = action.rewrite(schedule, problem)
    return schedule


def blocks_of(action: Action) -> tuple[str, ...]:
    """The blocks that an action treats; none if it treats model states or the step as a whole."""
    several = getattr(action, "blocks", None)
    one = getattr(action, "block", None)
    return tuple(several) if several else () if one is None else (one,)


def _once_per_block(actions: Iterable[Action]) -> None:
    """No technique twice on one block, and nothing beside one that claims the block for itself (`alone`)."""
    seen: dict[str, list[Action]] = {}
    for action in actions:
        for block in blocks_of(action):
            for other in [*seen.get(block, ()), *(seen.get("", ()) if block else [a for v in seen.values() for a in v])]:
                if action.name == other.name:
                    raise InvalidInput(f"`{block}` is to be treated by {action.name} twice", hint="name each block once")
                if getattr(action, "alone", False) or getattr(other, "alone", False):
                    raise InvalidInput(f"`{block}` cannot have both {other.name} and {action.name}", hint="choose one of them")
            seen.setdefault(block, []).append(action)


def close(schedule: Schedule) -> list[Step]:
    """Add a Drop at the end of every stay of every tensor in every tier.

    A stay begins when the tensor is made or copied in, and ends after the last of: its uses, the waits for its copies, and the
    moments until which something holds it. Tensors that live in a farther tier stay there. Frees are only ever derived here.
    """
    steps = list(schedule.steps())
    never = len(steps)
    at: dict[tuple[int, int], int] = {(-1, 0): -1, (len(schedule.trace.ops), 0): never}
    begins: dict[tuple[TensorId, str], list[int]] = {}
    touched: dict[tuple[TensorId, str], list[int]] = {}
    home = schedule.home
    tiers = {home}
    for x, info in {**schedule.trace.tensors, **schedule.added}.items():
        if info.born < 0 and x not in schedule.start:
            begins[(x, home)] = [-1]
    for i, step in enumerate(steps):
        if isinstance(step, Run):
            if step.op >= 0:
                at[(step.op, step.again)] = i
            if step.stream != "compute":
                continue  # what it works on stays for other reasons
            for x in step.writes:
                begins.setdefault((x, home), []).append(i)
            for x in (*step.reads, *step.mutates):
                touched.setdefault((x, home), []).append(i)
        elif isinstance(step, Copy):
            tiers.add(step.dst)
            for x in step.tensors:
                touched.setdefault((x, step.src), []).append(i)
                if step.lands:
                    begins.setdefault((x, step.dst), []).append(i)
                else:
                    touched.setdefault((x, step.dst), []).append(i)
        elif isinstance(step, Wait):
            for x in step.tensors:  # whichever end of the copy is in use, it is in use until here
                for key in [(x, tier) for tier in tiers if (x, tier) in begins]:
                    touched.setdefault(key, []).append(i)
    drops: dict[int, list[Drop]] = {}
    plainly, changed = schedule.trace.last_held, schedule.holds
    for (x, tier), starts in begins.items():
        marks = touched.get((x, tier), [])
        if len(starts) == 1:  # the common case: one stay
            end = max(starts[0], marks[-1] if marks else -1)  # marks are in order
            if tier == home:
                held = [at.get(mark, -1) for mark in changed[x]] if x in changed else [at.get((plainly[x], 0), -1)]
                end = max(end, *held) if held else end
            if end < never:
                drops.setdefault(end, []).append(Drop(tensor=x, tier=tier))
            continue
        if tier == home:
            marks = [*marks, *(at.get(mark, -1) for mark in schedule.held(x))]
        bounds = [*starts[1:], never + 1]
        for start, bound in zip(starts, bounds, strict=True):
            end = max((m for m in marks if start <= m < bound), default=start)
            if end < never:
                drops.setdefault(end, []).append(Drop(tensor=x, tier=tier))
    closed: list[Step] = list(drops.get(-1, ()))
    for i, step in enumerate(steps):
        closed.append(step)
        closed.extend(drops.get(i, ()))
    return closed
