"""`holdall plan`: make a plan, show its prediction and write it to a file. Exit code 3: no plan fits the budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import in_color, say, show_json
from holdall.cli._errors import INFEASIBLE
from holdall.cli._progress import progress_bar
from holdall.errors import Infeasible, InvalidInput

if TYPE_CHECKING:
    from holdall.experiments.request import PreparedRun, Request
    from holdall.types import Plan


def plan(
    model: given.MaybeModel = None,
    *,
    batch: given.Batch = 1,
    seq: given.Seq = 512,
    budget: given.Budget = "auto",
    gpu: given.Gpu = None,
    hardware: given.HardwareFile = None,
    planner: given.Planner = "auto",
    allow: given.Allow = None,
    dtype: given.Dtype = "float32",
    precision: given.Precision = None,
    autocast: given.Autocast = None,
    optimizer: given.Optimizer = "adamw",
    option: given.PlannerOption = None,
    trace: given.TraceFile = None,
    layout: given.Layout = None,
    phases: Annotated[
        bool | None,
        typer.Option(
            "--phases/--no-phases",
            help="What loading, the first step, evaluation, saving and resuming take; on by default, but for --json.",
            show_default=False,
        ),
    ] = None,
    longest_seq: Annotated[
        int | None,
        typer.Option(
            "--longest-seq", metavar="N", help="Also what the plan takes on a batch of this length.", show_default=False
        ),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            "--largest",
            metavar="WHAT",
            help="Find the largest batch, seq, or model of the family that fits.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            min=1,
            help="With --largest: how finely to search. [1; for seq 64, and no finer than 2 %]",
            show_default=False,
        ),
    ] = None,
    smallest_budget: Annotated[
        bool, typer.Option("--smallest-budget", help="Find the least budget for which there is a plan.")
    ] = False,
    keep_speed: Annotated[
        float | None,
        typer.Option(
            "--keep-speed",
            metavar="SHARE",
            help="With --smallest-budget: one that keeps this share of the speed, such as 0.9.",
            show_default=False,
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Budget against step time: a table, and with --html a page.")
    ] = False,
    points: Annotated[int, typer.Option("--points", metavar="N", min=2, help="With --pareto: budgets to try.")] = 8,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="With --pareto: the curve; with --gpus: the mesh in time.", show_default=False
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Plan for so many GPUs, each with this batch.", show_default=False),
    ] = None,
    per_node: Annotated[int, typer.Option("--per-node", metavar="N", min=1, help="With --gpus: GPUs in a node.")] = 8,
    inside: Annotated[
        str, typer.Option("--inside", metavar="NAME", help="With --gpus: network of the GPUs of a node.")
    ] = "nvlink-4",
    across: Annotated[
        str, typer.Option("--across", metavar="NAME", help="With --gpus: network of the nodes, a port for each GPU.")
    ] = "infiniband-ndr",
    search: Annotated[
        str,
        typer.Option(
            "--search",
            metavar="NAME",
            help="With --gpus: over meshes with pipelines by auto, alpa, galvatron or flexflow; shard: none of them.",
        ),
    ] = "auto",
    fewest_gpus: Annotated[
        bool, typer.Option("--fewest-gpus", help="With --gpus: the fewest GPUs, up to those, that suffice.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan here.", show_default=False)] = None,
    json: given.Json = False,
) -> None:
    """Decide what to keep, recompute and offload so that one training step fits the budget.

    Without --gpu or --hardware the plan is for this machine, which is measured first (a few seconds).

    \b
    Examples:
      holdall plan llama-3.2-1b --batch 4 --seq 2048 --dtype bfloat16 \\
          --gpu rtx-4090 --budget 16GiB --longest-seq 8192 --out llama.plan.json
      holdall plan gpt2 --seq 1024 --gpu rtx-4090 --largest batch
      holdall plan gpt2 --seq 1024 --gpu rtx-4090 --smallest-budget --keep-speed 0.9
      holdall plan gpt2 --seq 1024 --gpu rtx-4090 --pareto --html gpt2.html
      holdall plan llama-3-8b --gpus 64 --gpu h100-sxm --dtype bf16-mixed
      holdall plan llama-3-8b --gpus 64 --gpu h100-sxm --search alpa
    """
    from holdall.experiments.request import Request, planned, prepare

    request = Request(
        model=model,
        batch=batch,
        seq=seq,
        dtype=dtype,
        autocast=autocast,
        precision=precision,
        optimizer=optimizer,
        budget=budget,
        planner=planner,
        allow=allow,
        options=option or (),
        gpu=gpu,
        hardware=hardware,
        trace=trace,
        layout=layout,
    )
    asked = [name for name, is_on in (("largest", largest), ("smallest-budget", smallest_budget), ("pareto", pareto)) if is_on]
    is_over_ranks = gpus is not None or fewest_gpus
    curve = None if is_over_ranks else html
    _check_together(asked, {"step": step, "keep-speed": keep_speed, "html": curve, "longest-seq": longest_seq, "out": out})
    if is_over_ranks:
        nodes = (per_node, inside, across)
        _over_ranks(request, gpus, nodes, asked, largest, search=search, fewest=fewest_gpus, out=out, html=html, json=json)
        return
    if asked:
        question = asked[0]
        if question == "largest":
            assert largest is not None
            _largest(request, largest, step, out, json=json)
        elif question == "pareto":
            _pareto(request, points, html, json=json)
        else:
            _smallest(request, keep_speed, out, json=json)
        return
    with progress_bar() as progress:
        prepared = prepare(request, progress)
        try:
            prepared, made = planned(prepared, progress)
        except Infeasible as error:
            if not json:
                raise
            show_json(refusal_json(error, prepared))
            raise typer.Exit(INFEASIBLE) from None
        found = None
        if longest_seq is not None or (phases if phases is not None else not json):
            from holdall.cli._phases import find_phases

            found = find_phases(request, prepared, made, longest_seq=longest_seq, progress=progress)
    if out is not None:
        made.save(out)
    _show(made, prepared, found, json=json)
    if out is not None and not json:
        say(f"\nwritten to {out}")


def _over_ranks(
    request: Request,
    gpus: int | None,
    nodes: tuple[int, str, str],
    asked: list[str],
    largest: str | None,
    *,
    search: str,
    fewest: bool,
    out: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    from holdall.analysis.over_ranks import GpuCluster
    from holdall.cli._meshes import ON_SHARDS, SHARD, answer_by_search
    from holdall.cli._ranks import answer

    if gpus is None:
        raise InvalidInput("--fewest-gpus has no bound", hint="give the most GPUs that there are: --gpus 64 --fewest-gpus")
    if (asked and asked != ["largest"]) or (largest is not None and largest != "model") or (asked and fewest):
        raise InvalidInput("with --gpus the only questions are `--largest model` and `--fewest-gpus`", hint="ask one of them")
    if html is not None and (asked or fewest or search == SHARD):
        raise InvalidInput(
            "--html draws the mesh that a search finds", hint="leave the other question out: --gpus 8 --html FILE"
        )
    per_node, inside, across = nodes
    cluster = GpuCluster(gpus=gpus, per_node=per_node, inside=inside, across=across)
    if search not in ON_SHARDS:
        if asked or fewest or out is not None:
            raise InvalidInput(
                f"--search {search} answers no other question and writes no plan", hint="use --search shard, or leave it out"
            )
        answer_by_search(request, cluster, search, html=html, json=json)
        return
    found = answer(request, cluster, largest=largest is not None, fewest=fewest, search=search, html=html, json=json)
    _write(found, out, json=json)


def _show(made: Plan, prepared: PreparedRun, found: Any, *, json: bool) -> None:
    from holdall.reporting.text import plan_text

    if json:
        from holdall.cli._phases import phases_json

        show_json(plan_json(made) | (phases_json(found) if found is not None else {}))
        return
    say(plan_text(made, color=in_color()))
    if found is not None:
        from holdall.cli._phases import show_phases

        say()
        show_phases(found, prepared)


_GOES_WITH = {  # option -> the questions that it belongs to; "": a plain plan
    "step": ("largest",),
    "keep-speed": ("smallest-budget",),
    "html": ("pareto",),
    "longest-seq": ("",),
    "out": ("", "largest", "smallest-budget"),
}


def _check_together(asked: list[str], options: dict[str, Any]) -> None:
    """Raise for two questions at once, and for options that would have no effect."""
    if len(asked) > 1:
        raise InvalidInput(f"both --{asked[0]} and --{asked[1]} were given", hint=f"leave out --{asked[1]}")
    question = asked[0] if asked else ""
    for option, value in options.items():
        if value is not None and question not in _GOES_WITH[option]:
            fits = " or ".join(f"--{q}" if q else "a plain plan" for q in _GOES_WITH[option])
            raise InvalidInput(f"--{option} has no effect here", hint=f"it goes with {fits}")


def _largest(request: Request, kind: str, step: int | None, out: Path | None, *, json: bool) -> None:
    from holdall.cli._inverse import ask_largest, check_kind, show_largest

    check_kind(kind)
    if kind == "model" and step is not None:
        raise InvalidInput("--step has no effect with --largest model", hint="leave --step out")
    with progress_bar() as progress:
        found, value, names = ask_largest(request, kind, step=step, progress=progress)
    show_largest(found, kind, value, names, json=json)
    _write(found.plan, out, json=json)


def _smallest(request: Request, keep_speed: float | None, out: Path | None, *, json: bool) -> None:
    from holdall.cli._inverse import ask_smallest, show_smallest
    from holdall.experiments.request import prepare

    with progress_bar() as progress:
        prepared = prepare(request, progress)
        found = ask_smallest(prepared, keep_speed, progress)
    show_smallest(found, prepared, keep_speed, json=json)
    _write(found.plan, out, json=json)


def _pareto(request: Request, points: int, html: Path | None, *, json: bool) -> None:
    from holdall.cli._inverse import ask_pareto, show_pareto, write_page
    from holdall.experiments.request import prepare

    with progress_bar() as progress:
        prepared = prepare(request, progress)
        curve = ask_pareto(prepared, points, progress)
    show_pareto(curve, json=json)
    if html is not None:
        write_page(html, curve, request, prepared)
        if not json:
            say(f"\nwritten to {html}")


def _write(made: Plan, out: Path | None, *, json: bool) -> None:
    if out is not None:
        made.save(out)
        if not json:
            say(f"\nwritten to {out}")


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON: actions and prediction, without the timeline that the plan file has."""
    said = plan.predicted
    return {
        "feasible": True,
        "planner": plan.planner,
        "budget": dict(plan.budget),
        "predicted": {
            "peak": dict(said.peak),
            "seconds": said.seconds,
            "recompute_seconds": said.recompute_seconds,
            "stall_seconds": said.stall_seconds,
        },
        "solve_seconds": plan.solve_seconds,
        "actions": plan.to_json()["actions"],
        "why": list(plan.why),
    }


def refusal_json(error: Infeasible, prepared: PreparedRun) -> dict[str, Any]:
    """The JSON output if no plan fits; `smallest` is the smallest budget that a plan was found for, in bytes, or null."""
    return {
        "feasible": False,
        "planner": prepared.planner,
        "budget": prepared.budget,
        "smallest": error.smallest,
        "why": [error.fact, *([error.hint] if error.hint else [])],
    }
