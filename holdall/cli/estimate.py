"""`holdall estimate`: the peak memory of plain training, in one line."""

from __future__ import annotations

from typing import Annotated

import typer

from holdall.cli import _options as given
from holdall.cli._console import say, show_json
from holdall.units import format_bytes


def estimate(
    model: given.Model,
    *,
    batch: given.Batch = 1,
    seq: given.Seq = 512,
    dtype: given.Dtype = "float32",
    precision: given.Precision = None,
    autocast: given.Autocast = None,
    optimizer: given.Optimizer = "adamw",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cuda or cpu; a GPU need not be here.")] = "cuda",
    short: Annotated[bool, typer.Option("--short", "-q", help="Nothing but the number.")] = False,
    json: given.Json = False,
) -> None:
    """The peak memory of plain training of a model, in one line. Needs neither that memory nor a GPU.

    \b
    Examples:
      holdall estimate llama-3.2-1b --batch 4 --seq 2048 --dtype bfloat16
      holdall estimate llama-3.2-1b --batch 4 --seq 2048 --dtype bfloat16 --short
    """
    from holdall.experiments.request import plain_outcome
    from holdall.experiments.workload import describe_workload
    from holdall.reporting.text import KIND_LABELS

    workload = describe_workload(
        model, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, autocast=autocast, precision=precision
    )
    outcome = plain_outcome(workload.trace(device))
    home = next(iter(outcome.peak))
    kinds = {KIND_LABELS[k]: n for k, n in sorted(outcome.peak_kinds.items(), key=lambda item: -item[1])}
    if json:
        show_json({"workload": str(workload), "peak": outcome.peak[home], "reserved": outcome.reserved, "kinds": kinds})
        return
    if short:
        say(format_bytes(outcome.peak[home]))
        return
    parts = ", ".join(f"{label} {format_bytes(size)}" for label, size in kinds.items() if size >= outcome.peak[home] / 100)
    say(f"{workload}: {format_bytes(outcome.peak[home])} at the peak ({parts})")
