"""`holdall plan`: decide, say what to expect, write the plan. Exit code 3 says that nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import in_color, say, show_json
from holdall.cli._errors import INFEASIBLE
from holdall.cli._progress import progress_bar
from holdall.errors import Infeasible

if TYPE_CHECKING:
    from holdall.cli._planning import Prepared
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
    optimizer: given.Optimizer = "adamw",
    option: given.PlannerOption = None,
    trace: given.TraceFile = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan here.", show_default=False)] = None,
    json: given.Json = False,
) -> None:
    """Decide what to keep, recompute and offload so that one training step fits the budget.

    Without --gpu or --hardware the plan is for this machine, which is measured first (a few seconds).

    \b
    Example:
      holdall plan llama-3.2-1b --batch 4 --seq 2048 --dtype bfloat16 \\
          --gpu rtx-4090 --budget 16GiB --out llama.plan.json
    """
    from holdall.cli._planning import Request, prepare
    from holdall.reporting.text import plan_text

    request = Request(
        model=model,
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
        trace=trace,
    )
    with progress_bar() as progress:
        prepared = prepare(request, progress)
        try:
            made = prepared.plan(progress)
        except Infeasible as error:
            if not json:
                raise
            show_json(refusal_json(error, prepared))
            raise typer.Exit(INFEASIBLE) from None
    if out is not None:
        made.save(out)
    if json:
        show_json(plan_json(made))
        return
    say(plan_text(made, color=in_color()))
    if out is not None:
        say(f"\nwritten to {out}")


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan for programs: what was decided and what to expect, without the timeline that the file has."""
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


def refusal_json(error: Infeasible, prepared: Prepared) -> dict[str, Any]:
    """The same when nothing fits; `smallest` is the least budget found to work, in bytes, or null."""
    return {
        "feasible": False,
        "planner": prepared.planner,
        "budget": prepared.budget,
        "smallest": error.smallest,
        "why": [error.fact, *([error.hint] if error.hint else [])],
    }
