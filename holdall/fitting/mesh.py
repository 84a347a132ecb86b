"""Traces the step of one rank of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.parallel.ways import way_for
from holdall.problem import resolve_optimizer
from holdall.tracing import trace_sharded
from holdall.types import Mesh, Trace

Ranks = Mapping[str, int] | Mesh | None


def trace_on_mesh(
    model: torch.nn.Module,
    batch: Any,
    mesh: Mesh,
    way: str,
    optimizer: torch.optim.Optimizer | str | None,
    loss: Any,
    device: str | torch.device | None,
    precision: Any,
    autocast: Any,
    head: str | int,
) -> Trace:
    if any(dim.name == "pp" for dim in mesh.dims):
        raise Unsupported(
            "a mesh with `pp` is a pipeline, whose step is a call of its own",
            hint=f"use holdall.pipelines.start(model, micro_batches=8, loss=..., mesh={ {d.name: d.size for d in mesh.dims} })",
        )
    way = way_for(mesh, way)
    if precision is not None:
        raise Unsupported("`precision` does not work together with `mesh` yet", hint="leave one of them out")
    if head not in ("auto", "whole"):
        raise Unsupported("a chunked head does not work on a sharded model", hint='use head="whole"')
    rule = resolve_optimizer(optimizer, model)
    return trace_sharded(model, batch, mesh, way, optimizer=rule, loss=loss, device=device, autocast=autocast)
