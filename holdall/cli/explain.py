"""`holdall explain`: the reasons for a plan, its decision for every block, the contents of memory at the peak, and the cost of
other ways to free memory."""

from __future__ import annotations

import json as json_files
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, grid, in_color, say, show, show_json
from holdall.cli._progress import progress_bar
from holdall.errors import InvalidInput
from holdall.registry import allowed_by_default
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdall.analysis import Alternative
    from holdall.types import Hardware, Plan, Problem, Progress, Trace

_MOST = 14  # lines of alternatives


def explain(
    what: Annotated[str, typer.Argument(metavar="PLAN_FILE|MODEL", help="A plan written by `holdall plan --out`, or a model.")],
    *,
    batch: given.Batch = 1,
    seq: given.Seq = 512,
    budget: given.Budget = "auto",
    gpu: given.Gpu = None,
    hardware: given.HardwareFile = None,
    planner: given.Planner = "auto",
    allow: given.Allow = None,
    dtype: given.Dtype = "float32",
    autocast: given.Autocast = None,
    optimizer: given.Optimizer = "adamw",
    option: given.PlannerOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="For a plan file: the trace it was made for, to price alternatives with --gpu or --hardware.",
            show_default=False,
        ),
    ] = None,
    json: given.Json = False,
) -> None:
    """Why a plan does what it does, and what every alternative costs in milliseconds per GiB.

    For a model, the plan is made first, with the options of `holdall plan`.

    \b
    Examples:
      holdall explain llama.plan.json
      holdall explain gpt2 --batch 8 --seq 1024 --gpu rtx-4090 --budget 8GiB
    """
    from holdall.analysis import alternatives
    from holdall.experiments.request import Request, planned, prepare
    from holdall.types import Plan

    problem = None
    if is_plan_file(Path(what)):
        made = Plan.load(what)
        if trace is not None:
            with progress_bar() as progress:
                problem = _problem_of_files(made, trace, gpu, hardware, progress)
    elif trace is not None:
        raise InvalidInput(
            "--trace was given together with a model",
            hint="leave --trace out, or give a plan file, as in `holdall explain PLAN.json --trace TRACE.json`",
        )
    else:
        request = Request(
            model=what,
            batch=batch,
            seq=seq,
            dtype=dtype,
            autocast=autocast,
            optimizer=optimizer,
            budget=budget,
            planner=planner,
            allow=allow,
            options=option or (),
            gpu=gpu,
            hardware=hardware,
        )
        with progress_bar() as progress:
            prepared = prepare(request, progress)
            prepared, made = planned(prepared, progress)
            problem = _problem(prepared.trace, prepared.machine, prepared.budget, prepared.allow, progress)
    others = alternatives(problem) if problem is not None else None
    if json:
        show_json(_explained(made, others))
        return
    _show(made)
    if others is not None:
        _show_alternatives(others)
    else:
        say("\nto see the cost of alternatives, give the trace with --trace FILE and the machine with --gpu or --hardware")


def _problem_of_files(plan: Plan, path: Path, gpu: str | None, hardware: Path | None, progress: Progress) -> Problem:
    """The problem that a plan file solves, from the trace and the machine."""
    from holdall.experiments.request import check_device, find_machine
    from holdall.types import Trace

    read = Trace.load(path)
    if read.fingerprint != plan.trace:
        raise InvalidInput(f"the plan was not made for the trace `{path}`", hint="give the trace that was planned for")
    machine = find_machine(gpu, hardware, progress, device=read.about.device, budget=dict(plan.budget))
    check_device(read, machine)
    return _problem(read, machine, dict(plan.budget), sorted(allowed_by_default() | plan.count().keys()), progress)


def _problem(trace: Trace, machine: Hardware, budget: dict[str, int], allow: list[str] | None, progress: Progress) -> Problem:
    from holdall.cost.roofline import cost_trace
    from holdall.types import Problem

    made = Problem(trace=cost_trace(trace, machine), hardware=machine, budget=budget, progress=progress)
    return made if allow is None else replace(made, allow=frozenset({"keep", *allow}))


def is_plan_file(path: Path) -> bool:
    """Is this the path of a plan? True for any JSON file, existing or not, except the config of a model."""
    if not path.is_file():
        return path.suffix == ".json" and path.name != "config.json"
    try:
        data = json_files.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return path.name != "config.json"  # the reader reports other errors
    return not (isinstance(data, dict) and "model_type" in data)


def _show(plan: Plan) -> None:
    from holdall.reporting.text import bars, blocks_text

    say(plan.explain())
    if plan.about.rows:
        say(f"\n{blocks_text(plan.about.rows, color=in_color())}")
    if plan.predicted.peak_kinds:
        say(f"\nat the peak:\n{bars(plan.predicted.peak_kinds, color=in_color())}")


def _show_alternatives(others: Sequence[Alternative]) -> None:
    """The cheapest first; ms per GiB with every copy hidden behind computation, and with none."""
    if not others:
        say("\nno block of this step saves tensors that could be freed")
        return
    table = grid("to free memory", "where", "frees", "adds", "copies", "ms/GiB", "if not hidden", left=2)
    for a in others[:_MOST]:
        hidden, bare = _per_gib(a.per_gib), _per_gib(a.per_gib_unhidden)
        times = f"{a.count} x {a.where}"
        copies = format_seconds(a.copying) if a.copying else "-"
        add_row(table, a.what, times, format_bytes(a.freed), format_seconds(a.seconds), copies, hidden, bare)
    say("\nalternatives, each alone against keeping everything:")
    show(table)
    if len(others) > _MOST:
        say(f"and {len(others) - _MOST} dearer ones (--json has them)")


def _per_gib(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _explained(plan: Plan, others: Sequence[Alternative] | None) -> dict[str, Any]:
    said = plan.predicted
    return {
        "summary": plan.summary(),
        "why": list(plan.why),
        "blocks": [asdict(row) for row in plan.about.rows],
        "peak_where": said.peak_where,
        "peak_kinds": {kind.value: size for kind, size in said.peak_kinds.items()},
        "at_peak": [{"name": h.name, "kind": h.kind.value, "nbytes": h.nbytes} for h in said.at_peak],
        "alternatives": None if others is None else [_priced(a) for a in others],
    }


def _priced(a: Alternative) -> dict[str, Any]:
    return {**asdict(a), "ms_per_gib": a.per_gib * 1e3, "ms_per_gib_unhidden": a.per_gib_unhidden * 1e3}
