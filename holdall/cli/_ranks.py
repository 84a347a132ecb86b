"""`holdall plan --gpus N`: which mesh, which way to shard, and what a step then takes on each rank. All of it is simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdall.analysis import Largest
from holdall.analysis import largest as find_largest
from holdall.analysis.longer import LEAST, stack_of, with_layers
from holdall.analysis.over_ranks import GpuCluster, OverRanks, needed_by, plan_over_ranks
from holdall.cli._console import add_row, cell, facts, grid, say, show, show_json
from holdall.cli._inverse import family_by_size, why_not
from holdall.cli._meshes import meshes_beside, meshes_json, show_meshes_beside, write_mesh_page
from holdall.cli._progress import progress_bar
from holdall.cli.plan import plan_json
from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.experiments.request import Request, find_machine, read_budget
from holdall.experiments.workload import MIXED, Workload, describe_workload
from holdall.models import override
from holdall.problem import resolve_budget
from holdall.tracing import groups_of, model_signature
from holdall.types import Hardware, Plan, Progress, Trace
from holdall.units import format_bytes, format_seconds


def answer(
    request: Request, cluster: GpuCluster, *, largest: bool, fewest: bool, search: str, html: Path | None, json: bool
) -> Plan:
    """Find and show what is asked for; returns the plan of it."""
    with progress_bar() as progress:
        if largest:
            most, names = largest_model(request, cluster, progress)
        elif fewest:
            found, workload, machine, cluster = fewest_gpus(request, cluster, progress)
            meshes = None
        else:
            traced = trace_for_gpus(request, progress)
            found = shards_of(traced, cluster, progress)
            meshes = meshes_beside(traced, cluster, search, progress)
            workload, machine = traced.workload, traced.machine
    if largest:
        show_largest_model(most, names, json=json)
        return most.plan
    if html is not None:
        write_mesh_page(html, meshes)
    if json:
        tokens = cluster.gpus * workload.batch * (1 if workload.is_image else workload.seq)
        show_json(over_ranks_json(found, tokens) | meshes_json(meshes, found.plan.predicted.seconds))
        return found.plan
    show_over_ranks(found, workload, machine, cluster)
    show_meshes_beside(meshes, found.plan.predicted.seconds)
    if html is not None:
        say(f"\nthe mesh with pipelines or tensor ranks is drawn in {html}")
    return found.plan


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """A model for the GPUs of a cluster, traced on the batch of one of them."""

    workload: Workload
    machine: Hardware
    model: torch.nn.Module
    trace: Trace
    budget: dict[str, int]
    held: str | None  # dtype of shards, where modules compute in another


def trace_for_gpus(request: Request, progress: Progress) -> TracedRequest:
    if request.model is None:
        raise InvalidInput("`--gpus` needs a model, not a trace", hint="name a model, as in `holdall plan gpt2 --gpus 8`")
    if request.planner != "auto" or request.options or request.allow or request.autocast or request.precision:
        raise InvalidInput(
            "with --gpus the planner, its options, --allow, --autocast and --precision have no effect yet",
            hint="leave them out; use --dtype bf16-mixed for bf16 with float32 shards",
        )
    mixed = request.dtype in MIXED
    workload = describe_workload(
        request.model,
        batch=request.batch,
        seq=request.seq,
        dtype="bfloat16" if mixed else request.dtype,
        optimizer=request.optimizer,
    )
    machine = find_machine(request.gpu, request.hardware, progress)
    budget = resolve_budget(read_budget(request.budget), machine)
    progress(f"tracing {workload.source.name}", 0, 0, "")
    model = workload.build()[0]
    traced = _trace(workload, model, machine.device)
    held = "float32" if mixed else None
    return TracedRequest(workload=workload, machine=machine, model=model, trace=traced, budget=budget, held=held)


def shards_of(asked: TracedRequest, cluster: GpuCluster, progress: Progress) -> OverRanks:
    """The best way to shard over the GPUs of a cluster, each with the batch of the request."""
    groups = groups_of(asked.model, asked.trace)
    return plan_over_ranks(asked.trace, groups, cluster, asked.machine, budget=asked.budget, held=asked.held, progress=progress)


def ask_over_ranks(request: Request, cluster: GpuCluster, progress: Progress) -> tuple[OverRanks, Workload, Hardware]:
    traced = trace_for_gpus(request, progress)
    return shards_of(traced, cluster, progress), traced.workload, traced.machine


def _trace(workload: Workload, model: torch.nn.Module, device: str) -> Trace:
    """The trace of a deep model from that of a shallow one, where all of its layers are alike; else its own."""
    config = workload.source.config
    count = getattr(config, "num_hidden_layers", 0)
    kinds = getattr(config, "layer_types", None) or ()
    if count > 2 * LEAST and len(set(kinds)) < 2:
        short = replace(workload, source=override(workload.source, {"num_hidden_layers": LEAST}))
        try:
            traced = short.trace(device)
            layers = stack_of(traced)
            if len(layers) == LEAST and _alike(model, layers[0].module.rpartition(".")[0], count):
                deep = with_layers(traced, count)
                return replace(deep, about=replace(deep.about, signature=model_signature(model)))
        except Unsupported:
            pass
    return workload.trace(device)


def _alike(model: torch.nn.Module, parent: str, count: int) -> bool:
    """Have all of these layers the same modules, with parameters of the same shapes?"""
    layers = model.get_submodule(parent)
    if sum(1 for _ in layers.children()) != count:
        return False
    shapes = [
        [(name, type(module), [p.shape for p in module.parameters(recurse=False)]) for name, module in layer.named_modules()]
        for layer in layers.children()
    ]
    return all(shape == shapes[0] for shape in shapes)


def show_over_ranks(found: OverRanks, workload: Workload, machine: Hardware, cluster: GpuCluster) -> None:
    plan = found.plan
    said = plan.predicted
    held = found.held
    tokens = cluster.gpus * workload.batch * (1 if workload.is_image else workload.seq)
    links = {d.name: d.network.name for d in found.way.mesh.dims}
    between = {link: size for link, size in said.traffic.items() if link.partition(" ")[0] in links}
    unit = "images" if workload.is_image else "tokens"
    counted = Counter(action.name for action in plan.actions if not action.over_ranks)
    done = ", ".join(f"{n} x {name}" for name, n in counted.items()) or "everything kept"
    on_host = {t: size for t, size in said.peak.items() if t != machine.home.name and size}
    show(
        facts(
            {
                "each GPU": f"{workload}" + (f", {held} shards" if held else ""),
                "GPUs": f"{cluster.gpus} x {machine.name}",
                "networks": ", ".join(f"{name}: {network}" for name, network in links.items()),
                "shard": str(found.way),
                "activations": done,
                "memory per rank": f"{format_bytes(needed_by(said))} of {format_bytes(plan.budget[machine.home.name])}",
                **{f"on the host ({tier})": f"{format_bytes(size)} per rank" for tier, size in on_host.items()},
                **{f"sent, {link}": f"{format_bytes(size)} per rank and step" for link, size in between.items()},
                "time/step": format_seconds(said.seconds),
                f"{unit}/s": f"{tokens / said.seconds:,.0f}",
                "source": "simulated; datasheet rates, assumed latencies",
            }
        )
    )
    say()
    table = grid("way to shard", "memory", "time/step", "")
    table.columns[-1].justify = "left"
    for trial in found.trials:
        word = "states on the host" if trial.on_host else "recompute all" if trial.recomputes else "keep all"
        style = "" if trial.fits else "dim"
        row = (trial.way, format_bytes(trial.peak), format_seconds(trial.outcome.seconds), word if trial.fits else "too large")
        add_row(table, *(cell(text, style) for text in row))
    show(table)
    if found.factors:
        say()
        say("Shards of parameters, gradients and states, by a closed form without the update:")
        table = grid("search", "parts", "memory", "sent", "time/step")
        for one in found.factors:
            name = f"{one.system} {one.named}".strip()
            add_row(table, name, one.factors, format_bytes(one.nbytes), format_bytes(one.sent), format_seconds(one.seconds))
        show(table)


def over_ranks_json(found: OverRanks, tokens: int) -> dict[str, Any]:
    said = found.plan.predicted
    return {
        "mesh": {d.name: d.size for d in found.way.mesh.dims},
        "networks": {d.name: d.network.name for d in found.way.mesh.dims},
        "shard": found.way.shard,
        "replicate": list(found.way.replicate),
        "source": said.source,
        "bytes_per_rank": needed_by(said),
        "sent_per_rank": dict(said.traffic),
        "seconds": said.seconds,
        "tokens_per_second": tokens / said.seconds,
        "plan": plan_json(found.plan),
        "tried": [
            {
                "way": str(t.way),
                "bytes": t.peak,
                "seconds": t.outcome.seconds,
                "recomputes": t.recomputes,
                "states_on_host": t.on_host,
                "fits": t.fits,
            }
            for t in found.trials
        ],
        "closed_form": [
            {
                "system": f.system,
                "named": f.named,
                "factors": list(f.factors),
                "bytes": f.nbytes,
                "sent": f.sent,
                "seconds": f.seconds,
            }
            for f in found.factors
        ],
    }


def fewest_gpus(request: Request, cluster: GpuCluster, progress: Progress) -> tuple[OverRanks, Workload, Hardware, GpuCluster]:
    """The least number of GPUs, doubled from 1, that fits; up to those of the cluster."""
    count, error = 1, None
    while count <= cluster.gpus:
        asked = replace(cluster, gpus=count)
        try:
            return *ask_over_ranks(request, asked, progress), asked
        except (Infeasible, Unsupported) as refused:
            error = refused
        count *= 2
    assert error is not None
    raise error


def largest_model(request: Request, cluster: GpuCluster, progress: Progress) -> tuple[Largest, list[str]]:
    """The largest preset of the model's family that fits."""
    assert request.model is not None
    names = family_by_size(request.model, progress)

    def make_plan(n: int) -> Plan:
        return ask_over_ranks(replace(request, model=names[n - 1]), cluster, progress)[0].plan

    return find_largest(make_plan, start=len(names), most=len(names), progress=progress), names


def show_largest_model(found: Largest, names: list[str], *, json: bool) -> None:
    value, beyond = names[found.value - 1], found.beyond
    if json:
        show_json({"largest": "model", "value": value, "plan": plan_json(found.plan)})
        return
    say(f"largest model that fits: {value}")
    if beyond is not None:
        say(f"{names[beyond.value - 1]} does not: {why_not(beyond)}")
