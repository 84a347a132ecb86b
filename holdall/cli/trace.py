"""`holdall trace`: record one training step, show a summary, and write the file that `plan` reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, facts, grid, in_color, say, show, show_json
from holdall.units import format_bytes

if TYPE_CHECKING:
    from holdall.cli._summary import Summary

_CAVEAT = "(the formula counts a GELU as one tensor and always has dropout; it leaves out positions and the last norm)"


def trace(
    model: given.Model,
    *,
    batch: given.Batch = 1,
    seq: given.Seq = 512,
    dtype: given.Dtype = "float32",
    precision: given.Precision = None,
    autocast: given.Autocast = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="cuda or cpu; a GPU need not be here. auto: a GPU if there is one.")
    ] = "auto",
    optimizer: given.Optimizer = "adamw",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the trace here.", show_default=False)] = None,
    json: given.Json = False,
) -> None:
    """Record one training step without needing its memory: ops, blocks, bytes by kind, the plain peak.

    Example: holdall trace gpt2 --batch 8 --seq 1024 --device cuda --out gpt2.trace.json
    """
    from holdall.cli._summary import summarise
    from holdall.experiments.workload import describe_workload, pick_device

    workload = describe_workload(
        model, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, autocast=autocast, precision=precision
    )
    traced = workload.trace(pick_device(device))
    if out is not None:
        traced.save(out)
    summary = summarise(workload, traced)
    if json:
        show_json(summary.to_json())
        return
    _show(summary)
    if out is not None:
        say(f"\nwritten to {out}")


def _show(summary: Summary) -> None:
    from holdall.reporting.text import bars

    show(facts(summary.facts))
    say("\nblocks, and the bytes that they save for backward:")
    blocks = grid("kind", "count", "each", "together")
    for row in summary.blocks:
        add_row(blocks, row.kind, row.count, format_bytes(row.saved / row.count), format_bytes(row.saved))
    show(blocks)
    say(f"\nat the peak ({summary.outcome.peak_where}):")
    say(bars(summary.outcome.peak_kinds, color=in_color()))
    if summary.check:
        say("\ncompared with the closed form for a classic transformer:")
        check = grid("", "formula", "traced", "difference")
        for line in summary.check:
            add_row(check, line.label, line.show(line.expected), line.show(line.traced), f"{line.difference:+.1%}")
        show(check)
        say(_CAVEAT)
