"""Traces the step of one rank of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from holdall.actions.head import sum_in_place
from holdall.errors import Unsupported
from holdall.fitting.head import choose_head
from holdall.parallel.sharding.build import RULED, WHOLE_OVER_NODES
from holdall.parallel.ways import is_divided, way_for
from holdall.precision import Recipe, put_on
from holdall.problem import resolve_optimizer, resolve_precision, resolve_recipe
from holdall.runtime.head.lazy_logits import chunk_head
from holdall.tracing import trace_sharded
from holdall.tracing.calls import Given
from holdall.types import Mesh, Trace
from holdall.types.info import ChunkedHead

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
    given: dict[str, Given] | None = None,
) -> Trace:
    """`holdall.trace` on a mesh. Fills `given` with what each block was called with."""
    if any(dim.name == "pp" for dim in mesh.dims):
        raise Unsupported(
            "a mesh with `pp` is a pipeline, whose step is a call of its own",
            hint=f"use holdall.pipelines.start(model, micro_batches=8, loss=..., mesh={ {d.name: d.size for d in mesh.dims} })",
        )
    way = way_for(mesh, way)
    recipe, dtype = _recipe_over(way, precision)
    if recipe is not None:
        undo = put_on(recipe, model, to_trace=True)
        try:
            found = trace_on_mesh(model, batch, mesh, way, optimizer, loss, device, dtype, autocast, head, given)
        finally:
            undo()
        return replace(found, about=replace(found.about, recipe=str(recipe)))
    chunked = choose_head(model, batch, head, ranks=parts_of_rows(mesh))
    rule = resolve_optimizer(optimizer, model)
    how: dict[str, Any] = {"device": device, "precision": dtype, "autocast": autocast, "given": given}
    if chunked is None:
        return trace_sharded(model, batch, mesh, way, optimizer=rule, loss=loss, **how)
    path, rows = chunked

    def chunk(copied: torch.nn.Module) -> None:
        chunk_head(copied.get_submodule(path), rows=rows)

    try:
        traced = trace_sharded(model, batch, mesh, way, optimizer=rule, loss=loss, chunk=chunk, **how)
    except Unsupported:
        if head != "auto":
            raise
        return trace_sharded(model, batch, mesh, way, optimizer=rule, loss=loss, **how)
    if traced.about.device == "cuda" and mesh.is_by_engine(way):  # autograd adds DTensors to new ones
        traced = sum_in_place(traced)
    return replace(traced, about=replace(traced.about, head=ChunkedHead(module=path, rows=rows)))


def parts_of_rows(mesh: Mesh) -> int:
    """Ranks that have equal parts of the rows of one batch."""
    return next((dim.size for dim in mesh.dividing if dim.name == "cp"), 1)


def _recipe_over(way: str, precision: Any) -> tuple[Recipe | None, torch.dtype | None]:
    """(the recipe to be put on the model; None: it says a dtype alone, the dtype in which parameters are gathered, and modules
    compute; None: their own)."""
    recipe, dtype = resolve_recipe(precision), resolve_precision(precision)
    if recipe is not None and recipe.obstacle_over_ranks:
        raise Unsupported(
            f"precision {recipe} does not work together with `mesh`: {recipe.obstacle_over_ranks}",
            hint='use precision="bf16"',
        )
    own = None if recipe is None or recipe.is_dtype_alone else recipe
    by_data = way in (*RULED, *WHOLE_OVER_NODES)
    if own is not None and not by_data:
        raise Unsupported(
            f"precision {recipe} is over data by {', '.join((*RULED, *WHOLE_OVER_NODES))}; not by {way}",
            hint='use precision="bf16", or shard="fsdp" over a mesh of data',
        )
    if dtype is not None and not by_data and not is_divided(way):
        raise Unsupported(
            f"`precision` is over data by {', '.join((*RULED, *WHOLE_OVER_NODES))}; not by {way}",
            hint='use shard="fsdp", or leave `precision` out',
        )
    return own, dtype
