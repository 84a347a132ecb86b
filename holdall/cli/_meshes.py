"""`holdall plan --gpus N --search NAME`: meshes with pipelines and tensor ranks. All of it is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdall.analysis.over_meshes import OverMeshes, plan_over_meshes
from holdall.cli._console import facts, say, show, show_json
from holdall.cli._progress import progress_bar
from holdall.errors import Infeasible, Unsupported
from holdall.pipelines.searches import find_search
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from holdall.analysis.over_ranks import GpuCluster
    from holdall.cli._ranks import TracedRequest
    from holdall.experiments.request import Request
    from holdall.types import Progress

AUTO, SHARD = "auto", "shard"
ON_SHARDS = (AUTO, SHARD)  # searches that answer beside, or instead of, ways to shard
_STAGES = 8  # rows of ways that are shown


def answer_by_search(request: Request, cluster: GpuCluster, search: str, *, html: Path | None, json: bool) -> None:
    """What one published search finds, shown."""
    from holdall.cli._ranks import trace_for_gpus

    find_search(search)  # a name that is not known is refused before the trace
    with progress_bar() as progress:
        traced = trace_for_gpus(request, progress)
        found = ask_meshes(traced, cluster, search, progress)
    if html is not None:
        write_mesh_page(html, found)
    if json:
        show_json(mesh_json(found))
        return
    workload, machine = traced.workload, traced.machine
    say(f"{cluster.gpus} x {machine.name}, each {workload}" + (f", {traced.held} shards" if traced.held else ""))
    show(facts(mesh_facts(found)))
    if html is not None:
        say(f"\nwritten to {html}")


def write_mesh_page(html: Path, found: OverMeshes | None) -> None:
    """The picture of a plan over meshes: schedule, memory of ranks, bytes between stages."""
    from holdall.pipelines.hybrid.picture import mesh_page
    from holdall.pipelines.hybrid.plans import played
    from holdall.pipelines.hybrid.strategies import Pricing
    from holdall.types._json import write_text

    drawn = None if found is None else played(Pricing(found.model, found.cluster), found.plan)
    if found is None or drawn is None:
        raise Unsupported("there is no mesh to draw for this model", hint="leave --html out, or use more GPUs")
    said = {name: str(value) for name, value in mesh_facts(found).items() if value}
    title = f"{found.cluster.devices} GPUs: {said.pop('mesh')}"
    write_text(str(html), mesh_page(drawn, found.plan, title=title, memory=found.cluster.memory, facts=said))


def ask_meshes(asked: TracedRequest, cluster: GpuCluster, search: str, progress: Progress) -> OverMeshes:
    progress(f"meshes: {search}", 0, 0, "")
    return plan_over_meshes(
        asked.trace,
        asked.model,
        cluster,
        asked.machine,
        batch=asked.workload.batch,
        memory=asked.budget[asked.machine.home.name],
        held=asked.held,
        name=search,
    )


def meshes_beside(asked: TracedRequest, cluster: GpuCluster, search: str, progress: Progress) -> OverMeshes | None:
    """The default's meshes; None: it was told not to search, or there is nothing that a pipeline could be cut from."""
    if search == SHARD or cluster.gpus == 1:
        return None
    try:
        return ask_meshes(asked, cluster, search, progress)
    except (Infeasible, Unsupported):
        return None


def mesh_facts(found: OverMeshes) -> dict[str, object]:
    plan = found.plan
    mesh = plan.mesh
    named = " x ".join(f"{name} {size}" for name, size in mesh.items()) if mesh else f"{plan.pipes} stages"
    devices = sorted(set(plan.devices))
    rows = plan.described()
    ways = [f"{layers}: {way}" for layers, way in rows[:_STAGES]] + (["..."] if len(rows) > _STAGES else [])
    return {
        "search": found.search,
        "mesh": f"{named}, {' or '.join(map(str, devices))} GPUs a stage",
        "schedule": f"{plan.schedule}, {plan.micro_batches} micro-batches" if plan.pipes > 1 else f"{plan.micro_batches} x",
        "stages begin at layer": ", ".join(map(str, plan.cut[:-1])),
        "layers": "; ".join(ways),
        "memory per rank": f"{format_bytes(plan.peak)} of {format_bytes(found.cluster.memory)}",
        "time/step": format_seconds(plan.seconds),
        "source": "simulated, layer by layer; datasheet rates, assumed latencies",
        "run by": found.call and f"{found.call} (on CPUs; not on GPUs yet)",
        "not run": found.not_run,
    }


def mesh_json(found: OverMeshes) -> dict[str, Any]:
    plan = found.plan
    return {
        "search": found.search,
        "source": "simulated",
        "mesh": plan.mesh,
        "devices": list(plan.devices),
        "cut": list(plan.cut),
        "layers": [{"layers": layers, "way": way} for layers, way in plan.described()],
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "bytes_per_rank": list(plan.peaks),
        "seconds": plan.seconds,
        "call": found.call or None,
        "not_run": found.not_run or None,
    }


def meshes_json(found: OverMeshes | None, shards: float) -> dict[str, Any]:
    """Beside the best way to shard, which takes `shards` seconds."""
    if found is None:
        return {"fastest": SHARD, "fastest_seconds": shards}
    seconds = found.plan.seconds
    fastest = {"fastest": "mesh" if seconds < shards else SHARD, "fastest_seconds": min(seconds, shards)}
    return {"over_meshes": mesh_json(found), **fastest}


def show_meshes_beside(found: OverMeshes | None, shards: float) -> None:
    if found is None:
        return
    say()
    if found.plan.seconds >= shards:
        say("No mesh with pipelines or tensor ranks is faster.")
        return
    say("Faster, with pipelines or tensor ranks (no plan is written for these):")
    show(facts(mesh_facts(found)))
