"""`holdall explain`: the reasons of a plan, what it does with every block, and what sits in memory at its peak."""

from __future__ import annotations

import json as json_files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import in_color, say, show_json
from holdall.cli._progress import progress_bar

if TYPE_CHECKING:
    from holdall.types import Plan


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
    optimizer: given.Optimizer = "adamw",
    option: given.PlannerOption = None,
    json: given.Json = False,
) -> None:
    """Why a plan does what it does. For a model, the plan is made first, with the options of `holdall plan`.

    \b
    Examples:
      holdall explain llama.plan.json
      holdall explain gpt2 --batch 8 --seq 1024 --gpu rtx-4090 --budget 8GiB
    """
    from holdall.cli._planning import Request, prepare
    from holdall.types import Plan

    if is_plan_file(Path(what)):
        made = Plan.load(what)
    else:
        request = Request(
            model=what,
            batch=batch,
            seq=seq,
            dtype=dtype,
            optimizer=optimizer,
            budget=budget,
            planner=planner,
            allow=allow,
            options=option or (),
            gpu=gpu,
            hardware=hardware,
        )
        with progress_bar() as progress:
            made = prepare(request, progress).plan(progress)
    if json:
        show_json(_explained(made))
    else:
        _show(made)


def is_plan_file(path: Path) -> bool:
    """Whether a path is to be read as a plan: any JSON file, there or not, but the config of a model."""
    if not path.is_file():
        return path.suffix == ".json" and path.name != "config.json"
    try:
        data = json_files.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return path.name != "config.json"  # whichever reads it says what is wrong
    return not (isinstance(data, dict) and "model_type" in data)


def _show(plan: Plan) -> None:
    from holdall.reporting import BlockRow
    from holdall.reporting.text import bars, blocks_text
    from holdall.types._json import unpack

    rows = unpack(tuple[BlockRow, ...], list(plan.about.get("rows", ())), "the plan's table of blocks")
    say(plan.explain())
    if rows:
        say(f"\n{blocks_text(rows, color=in_color())}")
    if plan.predicted.peak_kinds:
        say(f"\nat the peak:\n{bars(plan.predicted.peak_kinds, color=in_color())}")


def _explained(plan: Plan) -> dict[str, Any]:
    said = plan.predicted
    return {
        "summary": plan.summary(),
        "why": list(plan.why),
        "blocks": list(plan.about.get("rows", ())),
        "peak_where": said.peak_where,
        "peak_kinds": {kind.value: size for kind, size in said.peak_kinds.items()},
        "at_peak": [{"name": h.name, "kind": h.kind.value, "nbytes": h.nbytes} for h in said.at_peak],
    }
