"""`fit` over several ranks: the step is traced as one of them, all ranks agree on the plan, and the model is sharded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from holdall import api
from holdall.actions.shard import Shard
from holdall.analysis.over_ranks import GpuCluster, ShardWay, plan_over_ranks
from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.fitting.captured import correct_blocks, plan_captured
from holdall.fitting.head import choose_head, fewest_rows, has_room_for_outputs, or_in_chunks
from holdall.fitting.mesh import parts_of_rows, trace_on_mesh
from holdall.fitting.request import FitRequest
from holdall.fitting.start import device_of_batch
from holdall.parallel.agree import ALIKE, from_first, refuse_other, together
from holdall.parallel.checks.by_turns import by_turns
from holdall.parallel.checks.values import compared, refuse_other_batches
from holdall.parallel.context import own_part
from holdall.parallel.groups import connect, device_mesh, ranks_here
from holdall.parallel.sharding.build import RULED
from holdall.parallel.ways import is_divided, is_in_parts_of_sequence, is_one_batch, split_way, way_for
from holdall.planning.finish import finish
from holdall.problem import hardware_for, make_problem
from holdall.registry import build_member
from holdall.runtime.harness import Harness
from holdall.runtime.head.lazy_logits import FEWEST, chunk_head, head_of
from holdall.tracing import groups_of, target_device
from holdall.tracing.calls import Given
from holdall.tracing.step import default_loss
from holdall.types import Hardware, Mesh, Plan, Planner, Trace, _json
from holdall.types.plan import silent


def start_on_ranks(
    request: FitRequest,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    *,
    adjust: Callable[[Plan, Trace], Plan] | None = None,
) -> Harness:
    """Returns the harness, switched on. Adaptation is off: no rank changes its plan by what it alone has measured.

    `adjust`: makes a plan for a trainer's whole budget of one for what it leaves."""
    assert request.mesh is not None
    _check(request)
    mesh = Mesh.of({"dp": ranks_here()} if isinstance(request.mesh, str) else request.mesh)
    told = request.progress or silent
    on = request.device if request.device is not None else device_of_batch(batch)
    request = replace(request, device=on)
    kind = target_device(model, on).type
    device_mesh(mesh, kind)  # refuses a run with other ranks before anything slow
    connect(kind)
    if request.shard == "auto" and not mesh.dividing:
        way = from_first(lambda: _fastest_way(request, model, optimizer, batch, mesh))
    else:
        way = way_for(mesh, request.shard)
    if is_one_batch(way):
        refuse_other_batches(batch, mesh)
    planner, given = request.planner, dict(request.options)

    called: dict[str, Given] = {}  # what each block was called with
    how = request.loss, request.device, request.precision, request.autocast
    asked: dict[str, Any] = {"allow": request.allow, "reads_gradients": request.reads_gradients}
    asked["accumulate"] = request.accumulate

    def correct(trace: Trace, plan: Plan) -> Trace | None:
        return correct_blocks(trace, plan, model, called, request.precision)

    def found(head: str | int) -> tuple[tuple[Trace, Plan, Hardware], bool]:
        """The trace of this rank, the plan of the first and its machine; whether the loop can keep what the model returns."""
        traced = together(lambda: trace_on_mesh(model, batch, mesh, way, optimizer, *how, head, given=called))
        shared = [(a.name, _json.pack(a)) for a in Shard.samples(traced)]
        refuse_other("plan", (traced.about.signature, shared, [b.name for b in traced.blocks], planner), ALIKE)

        def make() -> tuple[Plan, Hardware, bool]:
            machine = hardware_for(traced, request.hardware, request.budget)

            def planned(trace: Trace) -> Plan:
                return api.plan(
                    trace, planner=planner, budget=request.budget, hardware=machine, progress=told, **asked, **given
                )

            made, trace = plan_captured(traced, planned, correct)
            return made, machine, has_room_for_outputs(made, trace)

        first, machine, has_room = from_first(make)
        return (traced, first, machine), has_room

    head, rows = from_first(lambda: _heads(request, model, batch, mesh))
    try:
        traced, first, machine = or_in_chunks(found, head, rows, told)
    except Unsupported:
        if request.head != "auto" or head == "whole":
            raise
        traced, first, machine = found("whole")[0]  # the loss reads logits whose weight has left: zero3, outside of the model

    def mine() -> Plan:
        """The actions of rank 0, with what this rank expects of them."""
        built: Planner = build_member("planners", planner, given, f"planner {planner}")
        captured = correct(traced, first) or traced
        problem = make_problem(captured, budget=request.budget, hardware=machine, **asked)
        made = finish(built, problem, first.actions, why=first.why)
        return made if adjust is None else adjust(made, captured)

    plan = together(mine)
    with _compared(request, model, batch, mesh, way, traced):
        return api.apply(plan, model, optimizer, enforce=request.enforce, record=request.record, progress=told)


def _heads(request: FitRequest, model: torch.nn.Module, batch: Any, mesh: Mesh) -> tuple[str | int, int | None]:
    """How the head is computed on every rank, and the rows of its chunks where the step does not fit otherwise."""
    ranks = parts_of_rows(mesh)
    chosen = choose_head(model, batch, request.head, ranks=ranks)
    rows = fewest_rows(model, batch, request.head, request.allow, ranks=ranks)
    return "whole" if chosen is None else chosen[1], rows


def _compared(
    request: FitRequest, model: torch.nn.Module, batch: Any, mesh: Mesh, way: str, trace: Trace
) -> AbstractContextManager[None]:
    """Does a divided model compute the same?"""
    if not is_divided(way):
        return nullcontext()
    target = target_device(model, request.device)
    run = request.loss or default_loss
    in_parts = mesh if is_in_parts_of_sequence(way) or "sequence" in split_way(way)[1] else None
    own = own_part(mesh, way, dist.get_rank()) if is_in_parts_of_sequence(way) else None

    def evaluate() -> Any:
        return run(model, batch)

    def evaluate_whole() -> Any:
        """A rank may have no room for the whole model, nor for all logits."""
        is_chunked = trace.about.head is not None or (own is not None and request.head != "whole")
        head = head_of(model) if is_chunked else None
        undo = chunk_head(head[1], rows=FEWEST) if head is not None else lambda: None
        try:
            with _there(model, trace, target):
                return evaluate()
        finally:
            undo()

    alike = _alike(model, trace, own is None)
    return compared(model, evaluate, whole_run=evaluate_whole, modules=alike, in_parts=in_parts, own=own)


def _there(model: torch.nn.Module, trace: Trace, device: torch.device) -> AbstractContextManager[None]:
    """The model on this device, where it need not have room: what comes from elsewhere comes module by module, unless some read
    weights of others."""
    if all(p.device.type == device.type for p in model.parameters()):
        return nullcontext()
    if trace.about.shards is not None and trace.about.shards.readers:
        model.to(device)
        return nullcontext()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return by_turns(model, lambda t: t.to(device))


def _alike(model: torch.nn.Module, trace: Trace, layers_alone: bool) -> tuple[str, ...]:
    """Modules that return on every rank what they would on one: layers, and what is around them unless ranks take sums there
    later. What is inside may compute with parts, and experts with the tokens of others."""
    layers, shards = groups_of(model, trace), trace.about.shards
    if layers_alone:
        return layers
    within = tuple(f"{path}." for path in (*layers, *(shards.experts if shards is not None else ())))
    return tuple(path for path, _ in model.named_modules() if not path.startswith(within))


def _fastest_way(
    request: FitRequest, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, mesh: Mesh
) -> str:
    """The way to shard with the shortest predicted step that fits; where none does by rule, the one that takes least memory."""
    plain = api.trace(
        model,
        batch,
        optimizer=optimizer,
        loss=request.loss,
        device=request.device,
        autocast=request.autocast,
        head=_heads(request, model, batch, mesh)[0],
    )
    machine = hardware_for(plain, request.hardware, request.budget)
    named = [name for name in RULED if name != "ddp" or len(mesh.dims) == 1]
    choices = [ShardWay(mesh=mesh, shard=name, replicate=mesh.replicas) for name in named]
    try:
        found = plan_over_ranks(
            plain, groups_of(model, plain), GpuCluster(gpus=mesh.ranks), machine, budget=request.budget, choices=choices
        )
    except Infeasible:  # the planner has more to offer than recomputation
        return "zero3"
    return found.way.shard


def _check(request: FitRequest) -> None:
    """Refuse what is not planned over ranks yet."""
    given = {
        "layout": request.layout is not None,
        "lengths": request.lengths is not None,
        "compile": request.compile is not False,
    }
    for name, is_given in given.items():
        if is_given:
            raise Unsupported(
                f"`{name}` does not work together with `mesh` yet: a sharded step is whole",
                hint=f"call fit(..., mesh=...) without `{name}`",
            )
    if request.precision is not None and request.shard == "auto":
        raise Unsupported('shard="auto" compares ways in one precision', hint='name one with `precision`: shard="fsdp"')
    if isinstance(request.mesh, str) and request.mesh != "auto":
        raise InvalidInput(f"`mesh` is {request.mesh!r}", hint='use mesh={"dp": 2}, or mesh="auto" for all ranks of the run')
    if request.plan is not None:
        raise InvalidInput(
            "`plan` and `mesh` were both given", hint="call `holdall.apply(plan, model, optimizer)` on all ranks"
        )
