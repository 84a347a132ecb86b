"""What must be so before a plan is put on a model, and the stores that it needs."""

from __future__ import annotations

import torch

from holdall.errors import InvalidInput, TraceMismatch, Unsupported
from holdall.registry import member_class, member_names
from holdall.sharded import sharded_parameter
from holdall.tiers import Store
from holdall.tracing import model_signature
from holdall.types import Action, Plan


def check_belongs(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if plan.signature and plan.signature != model_signature(model):
        raise TraceMismatch(
            f"the plan was made for another model ({plan.about.model}) than this {type(model).__name__}: "
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
    planned = plan.about.device
    if planned and device not in (planned, "cpu", "meta"):  # a model on the CPU is moved to where the plan computes
        raise TraceMismatch(
            f"the plan is for {planned}, but the model is on {device}",
            hint=f'move the model, or trace with device="{device}"',
        )
    if planned == "cuda" and not torch.cuda.is_available():
        raise TraceMismatch("the plan is for cuda, which this machine does not have", hint='trace with device="cpu"')


def stores_for(plan: Plan, model: torch.nn.Module) -> list[Store]:
    """A store for every tier that an action of the plan uses."""
    _check_shards(plan, model)
    near = next(iter(list(plan.budget)[1:]), "")
    names = dict.fromkeys(tier or near for action in plan.actions for tier in sorted(action.tiers))
    device = torch.device(plan.about.device or next(model.parameters()).device.type)
    stores: list[Store] = []
    try:
        for name in filter(None, names):
            if name not in member_names("tiers") or name not in plan.budget:
                raise Unsupported(f"there is no tier `{name}`", hint="plan again with this version")
            taken = plan.about.process if name == near else 0
            stores.append(member_class("tiers", name)(capacity=plan.budget[name] - taken, device=device))
            if hasattr(stores[-1], "prepare"):  # what the plan needs is reserved, or refused, before the first step
                stores[-1].prepare(plan.predicted.peak.get(name, 0))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores


def is_over_ranks(plan: Plan, model: torch.nn.Module) -> bool:
    """Must all ranks have this plan?"""
    return any(action.over_ranks for action in plan.actions) or bool(sharded_parameter(model))


def is_able(action: type[Action]) -> bool:
    """May it be planned for a model that will be sharded by hand?"""
    return action.on_shards and not action.over_ranks and not action.only_by_fit


def _check_shards(plan: Plan, model: torch.nn.Module) -> None:
    """Refuse a plan for a model that is sharded over ranks, if it has more than actions that are made for that."""
    name = sharded_parameter(model)
    if not name and not any(action.over_ranks for action in plan.actions):
        return
    wrong = next((a.name for a in plan.actions if not a.on_shards or (name and (a.only_by_fit or a.by_ops))), "")
    if plan.about.precision or (name and plan.about.recipe):
        wrong = f"precision {plan.about.recipe or plan.about.precision}"
    if plan.about.layout is not None:
        wrong = f"layout {plan.about.layout.name}"
    if wrong:
        able = sorted(n for n in member_names("actions") if is_able(member_class("actions", n)))
        raise Unsupported(
            f"the plan has `{wrong}`, which does not work on a model that is sharded over ranks"
            + (f" (`{name}` is a DTensor)" if name else ""),
            hint=f'plan the unsharded model with head="whole" and holdall.plan(..., allow={able})',
        )
