"""`holdall demo`: a check on this machine in a minute: the same losses in less memory, as predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, grid, say, show, show_json
from holdall.cli._errors import FAILED
from holdall.cli._progress import progress_bar
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdall.experiments.demo_runs import DemoRow


def demo(
    *,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps of each run.")] = 10,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    planner: given.Planner = "auto",
    allow: Annotated[
        str | None,
        typer.Option(
            "--allow",
            metavar="A,B",
            help="Actions that may be used. By default recompute on a CPU, whose memory has no farther one, and all on a GPU.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The report of the last run.")] = Path("holdall-demo.html"),
    json: given.Json = False,
) -> None:
    """Train a tiny GPT plain, then in half and in a quarter of its activation memory, and compare bit for bit.

    Exit code 1: a loss or weight differs, or a budget is exceeded.

    Example: holdall demo --steps 4 --device cpu
    """
    from holdall.experiments.demo_runs import SIZES, Demo
    from holdall.experiments.request import split
    from holdall.experiments.workload import check_runnable, pick_device

    on = check_runnable(pick_device(device))
    allowed = split(allow) or (["recompute"] if on == "cpu" else None)
    with progress_bar() as progress:
        rows = list(Demo(steps=steps, device=on, planner=planner, allow=allowed, progress=progress).rows())
    rows[-1].report.save(out)
    if json:
        show_json([_plain(row) for row in rows])
    else:
        size = SIZES[on]
        say(
            f"GPT of {size.blocks} blocks, width {size.width}, batch {size.rows} x {size.length} bytes, {steps} steps on {on}\n"
        )
        _show(rows)
        say(f"\nreport of the last run: {out}")
    if not all(row.identical and row.fits for row in rows):
        raise typer.Exit(FAILED)


def _show(rows: Sequence[DemoRow]) -> None:
    table = grid("run", "decision", "losses", "budget", "predicted", "measured", "fits", "step", left=3)
    for row in rows:
        add_row(
            table,
            row.name,
            row.decision,
            cell("identical", "green") if row.identical else cell("DIFFERENT", "red"),
            format_bytes(row.budget),
            format_bytes(row.predicted),
            format_bytes(row.measured),
            cell("yes", "green") if row.fits else cell("NO", "red"),
            format_seconds(row.report.latest.seconds),
        )
    show(table)
    for row in rows:
        if row.note:
            say(f"note: {row.note}")


def _plain(row: DemoRow) -> dict[str, Any]:
    return {
        "run": row.name,
        "decision": row.decision,
        "identical": row.identical,
        "losses": list(row.run.losses),
        "budget": row.budget,
        "predicted": row.predicted,
        "measured": row.measured,
        "fits": row.fits,
        "seconds": row.report.latest.seconds,
        "note": row.note,
    }
