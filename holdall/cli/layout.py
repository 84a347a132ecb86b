"""`holdall layout`: what layouts and allocators reserve for the tensors of a planned step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, grid, say, show, show_json
from holdall.cli._progress import progress_bar
from holdall.errors import InvalidInput
from holdall.registry import build_member, member_names, read_choice
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdall.analysis import LayoutRow
    from holdall.types import Plan


def layout(
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
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts",
            metavar="A,B",
            help="Some of the layouts, with options as in imanishi:moves=5000. [all of them]",
            show_default=False,
        ),
    ] = None,
    json: given.Json = False,
) -> None:
    """Lay out the tensors of a planned step: reserved bytes for those that are live at the peak, by layout.

    Live bytes are the lower bound of every layout. Static layouts give every tensor an offset before the step; allocators are
    simulated over a few steps, as they would be asked. The plan is made first, with the options of `holdall plan`.

    \b
    Examples:
      holdall layout llama-3.2-3b --seq 2048 --precision bf16 --gpu h200 --budget 24GiB
      holdall layout gpt2 --gpu rtx-4090 --budget 6GiB --layouts caching,expandable,imanishi:moves=2000
    """
    from holdall.analysis import compare_layouts
    from holdall.cost.roofline import cost_trace
    from holdall.experiments.request import Request, planned, prepare
    from holdall.types import Problem

    members = _members(layouts)
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
    )
    with progress_bar() as progress:
        prepared = prepare(request, progress)
        prepared, made = planned(prepared, progress)
        machine = prepared.machine
        costed = cost_trace(prepared.trace, machine)
        problem = Problem(trace=costed, hardware=machine, budget=prepared.budget, progress=progress)
        rows = compare_layouts(problem, made.actions, members)
    if json:
        show_json([{**asdict(row), "ratio": row.ratio} for row in rows])
        return
    _show(made, problem.home, rows)


def _members(text: str | None) -> list[Any]:
    """The layouts as they are typed; all of them, static ones first, if none is named."""
    typed = [part.strip() for part in text.split(",") if part.strip()] if text is not None else list(member_names("layouts"))
    if not typed:
        raise InvalidInput("--layouts names no layout", hint=f"name some of {', '.join(member_names('layouts'))}")
    found = [build_member("layouts", *read_choice(choice), f"--layouts {choice}") for choice in typed]
    return found if text is not None else sorted(found, key=lambda member: (not member.is_static, member.name))


def _show(plan: Plan, home: str, rows: Sequence[LayoutRow]) -> None:
    first = rows[0]
    say(
        f"{plan.planner} for {format_bytes(plan.budget[home])} of {home}: "
        f"{format_bytes(plan.predicted.peak[home])} live at the peak, {first.tensors} tensors\n"
    )
    table = grid("layout", "kind", "reserved", "live", "reserved/live", "found in", left=2)
    for row in rows:
        add_row(
            table,
            row.name,
            "static" if row.is_static else "allocator",
            format_bytes(row.reserved),
            format_bytes(row.live),
            f"{row.ratio:.4f}",
            format_seconds(row.seconds),
        )
    show(table)
