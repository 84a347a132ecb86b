"""The plan of a rung of the ladder."""

from __future__ import annotations

from typing import Any

from holdall.planning.updates_in_backward import at_most, plan_with_updates
from holdall.registry import build_member
from holdall.types import Plan, Problem


def decide(problem: Problem, name: str, options: dict[str, Any], *, in_backward: bool = False) -> Plan:
    """The plan for the problem's budget; if none fits, the one with the least memory that was found."""
    planner = build_member("planners", name, options, f"planner {name}")
    return plan_with_updates(planner, problem) if in_backward else at_most(planner, problem)
