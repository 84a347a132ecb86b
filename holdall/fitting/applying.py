"""Checks that a plan belongs to a model, and opens the tier that it needs."""

from __future__ import annotations

from typing import Any

import torch

from holdall.errors import InvalidInput, TraceMismatch, Unsupported
from holdall.registry import member_class, member_names
from holdall.tracing import model_signature
from holdall.types import Plan


def check_belongs(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if plan.signature and plan.signature != model_signature(model):
        raise TraceMismatch(
            f"the plan was made for another model ({plan.about.get('model')}) than this {type(model).__name__}: "
            "parameter names, shapes or dtypes differ",
            hint="make a plan for this model with `holdall.trace` and `holdall.plan`, or call `holdall.fit`",
        )
    if optimizer is not None:
        own = {id(p) for p in model.parameters()}
        if any(id(p) not in own for g in optimizer.param_groups for p in g["params"]):
            raise InvalidInput(
                "the optimizer holds parameters that are not the model's",
                hint="build the optimizer over this model's parameters, after it was moved or wrapped",
            )
    device = next((p.device.type for p in model.parameters()), "cpu")
    planned = plan.about.get("device")
    moves = any(action.places_states for action in plan.actions) and device == "cpu"
    if planned and device not in (planned, "meta") and not moves:
        raise TraceMismatch(
            f"the plan is for {planned}, but the model is on {device}",
            hint=f'move the model, or trace with device="{device}"',
        )


def store_for(plan: Plan, model: torch.nn.Module) -> Any:
    """The farther tier of the plan, if any action uses one."""
    tiers = list(plan.budget)
    uses = any(action.uses_store for action in plan.actions)
    if len(tiers) < 2 or not uses:
        return None
    if tiers[1] not in member_names("tiers"):
        raise Unsupported(f"there is no tier `{tiers[1]}`", hint="make the plan again with this version of holdall")
    device = torch.device(str(plan.about.get("device") or next(model.parameters()).device.type))
    left = plan.budget[tiers[1]] - int(plan.about.get("process") or 0)
    return member_class("tiers", tiers[1])(capacity=left, device=device)
