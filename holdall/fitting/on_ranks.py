"""`fit` over several ranks: the step is traced as one of them, all ranks agree on the plan, and the model is sharded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from holdall import api
from holdall.errors import InvalidInput, Unsupported
from holdall.fitting.request import FitRequest
from holdall.parallel.agree import together
from holdall.parallel.checking import compared, refuse_other_batches
from holdall.parallel.groups import device_mesh
from holdall.parallel.ways import DIVIDED, is_divided, is_one_batch, way_for
from holdall.runtime.harness import Harness
from holdall.tracing.step import default_loss
from holdall.types import Mesh, Plan
from holdall.types.plan import silent


def start_on_ranks(request: FitRequest, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> Harness:
    """Returns the harness, switched on. Adaptation is off: no rank changes its plan by what it alone has measured."""
    assert request.mesh is not None
    mesh = Mesh.of(request.mesh)
    _check(request)
    told = request.progress or silent
    device_mesh(mesh, "cpu")  # refuses a run with other ranks before anything slow
    way = way_for(mesh, request.shard)
    if is_one_batch(way):
        refuse_other_batches(batch)

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
    with _compared(request, model, batch, way):
        return api.apply(plan, model, optimizer, enforce=request.enforce, record=request.record, progress=told)


def _compared(request: FitRequest, model: torch.nn.Module, batch: Any, way: str) -> AbstractContextManager[None]:
    """Does a divided model compute the same?"""
    if not is_divided(way):
        return nullcontext()
    run = request.loss or default_loss
    return compared(model, lambda: run(model, batch), outputs=way not in DIVIDED["cp"])


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
