"""`fit` over several ranks: the step is traced as one of them, all ranks agree on the plan, and the model is sharded."""

from __future__ import annotations

from typing import Any

import torch

from holdall import api
from holdall.errors import InvalidInput, Unsupported
from holdall.fitting.request import FitRequest
from holdall.parallel.agree import together
from holdall.parallel.groups import device_mesh
from holdall.runtime.harness import Harness
from holdall.types import Mesh, Plan
from holdall.types.plan import silent


def start_on_ranks(request: FitRequest, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> Harness:
    """Returns the harness, switched on. Adaptation is off: no rank changes its plan by what it alone has measured."""
    assert request.mesh is not None
    mesh = Mesh.of(request.mesh)
    _check(request)
    told = request.progress or silent
    device_mesh(mesh, "cpu")  # refuses a run with other ranks before anything slow

    def make() -> Plan:
        traced = api.trace(
            model,
            batch,
            optimizer=optimizer,
            loss=request.loss,
            device=request.device,
            autocast=request.autocast,
            head=request.head,
            mesh=mesh,
            shard=request.shard,
        )
        return api.plan(traced, planner="nop", budget=request.budget, hardware=request.hardware, progress=told)

    plan = together(make)
    return api.apply(plan, model, optimizer, enforce=request.enforce, record=request.record, progress=told)


def _check(request: FitRequest) -> None:
    """Refuse what is not planned over ranks yet."""
    given = {
        "planner": request.planner not in ("auto", "nop"),
        **dict.fromkeys(request.options, True),
        "precision": request.precision is not None,
        "accumulate": request.accumulate != 1,
        "layout": request.layout is not None,
        "lengths": request.lengths is not None,
        "compile": request.compile is not False,
        "allow": request.allow is not None,
        "head": request.head not in ("auto", "whole"),
    }
    for name, is_given in given.items():
        if is_given:
            raise Unsupported(
                f"`{name}` does not work together with `mesh` yet: a sharded step keeps its activations and is one backward",
                hint=f"call fit(..., mesh=...) without `{name}`",
            )
    if request.plan is not None:
        raise InvalidInput(
            "`plan` and `mesh` were both given", hint="call `holdall.apply(plan, model, optimizer)` on all ranks"
        )
