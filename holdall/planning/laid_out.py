"""The arena of a planned step: the offsets of its tensors, by the layout that the problem names, and what that reserves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdall.registry import build_member
from holdall.simulator.allocators import ArenaModel, HostArenaModel
from holdall.simulator.lifetimes import PlannedStep
from holdall.types import Action, Outcome, PlannedLayout, Problem
from holdall.types.arena import is_placed, lay_out


def with_layout(problem: Problem, actions: Sequence[Action], outcome: Outcome) -> tuple[Outcome, PlannedLayout | None]:
    """(the outcome with the bytes that the layout's arena and the other tensors take, the layout). Without a layout the outcome
    is as it was: the device's own allocator decides where tensors lie."""
    if not problem.layout:
        return outcome, None
    problem.progress(f"laying out by {problem.layout}", 0, 0, "")
    lifetimes, _ = PlannedStep.of(problem, actions).run()
    planned = lay_out(build_member("layouts", problem.layout, {}, f"layout {problem.layout}"), lifetimes)
    outside = [t for n, t in enumerate(lifetimes.tensors) if not is_placed(lifetimes, n, planned.smallest)]
    others = replace(lifetimes, tensors=tuple(outside), dynamic=frozenset()).load
    kind = ArenaModel if problem.hardware.device == "cuda" else HostArenaModel
    reserved = kind.arena_bytes(planned.reserved, others)
    return replace(outcome, reserved=reserved, cramped=reserved > problem.limit(problem.home)), planned
