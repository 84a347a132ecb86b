"""`holdall ladder`: techniques added one after the other, each measured in a real run."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, grid, say, show, show_json
from holdall.cli._errors import FAILED
from holdall.cli._progress import progress_bar
from holdall.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdall.experiments.ladder_runs import Ladder, LadderStep

_UNCOUNTED = "--"
_TOO_SLOW = 4.0  # times the time in float32


def ladder(
    model: given.Model,
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="24GiB, or 0.5 of the device; half of what plain training takes if not given.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=2, help="Steps of each run.")] = 4,
    batch: given.Batch = 4,
    seq: given.Seq = 64,
    everything: Annotated[
        bool, typer.Option("--all/--until-it-fits", help="Climb every rung, or stop at the first that fits the budget.")
    ] = False,
    optimizer: given.Rule = "adamw",
    precision: given.Precision = None,
    bf16: Annotated[
        bool | None,
        typer.Option(
            "--bf16/--no-bf16", help="With or without the rungs in bf16; by default where it is not slow.", show_default=False
        ),
    ] = None,
    recipes: Annotated[
        str,
        typer.Option(
            "--recipes",
            metavar="A,B",
            help="Also plain training under these recipes of `holdall precisions`, or `all`: loss and bytes.",
            show_default=False,
        ),
    ] = "",
    hardware: given.HardwareFile = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows here.", show_default=False)] = None,
    json: given.Json = False,
) -> None:
    """Add one technique after the other and measure each: memory, tokens per second, and the loss after a few steps.

    Trains the model on the bundled text, on the GPU if there is one. Memory and time are measured, not predicted. Each
    rung says whether it gives the bits of the rung before (exact), the same sums in another order (reordered) or
    other numbers (lossy). Exit code 1: no rung fits, or a rung declared exact was not.

    \b
    Example:
      holdall ladder tiny-llama --budget 3MiB --all --csv ladder.csv
      holdall ladder tiny-llama --recipes bf16,fp8,int8
    """
    from holdall.errors import Unsupported
    from holdall.experiments.ladder_rungs import Settings, slowness_of_bf16
    from holdall.experiments.ladder_runs import Ladder
    from holdall.experiments.request import find_machine
    from holdall.experiments.sweep_files import write_csv
    from holdall.experiments.workload import check_runnable, describe_workload, quiet

    workload = describe_workload(model, batch=batch, seq=seq, optimizer=optimizer, precision=precision)
    if workload.source.task != "causal-lm":
        raise Unsupported(
            f"`holdall ladder` trains causal language models, and {model} is not one",
            hint="name one, as in `holdall ladder tiny-llama`",
        )
    with progress_bar() as progress, quiet():
        machine = find_machine(None, hardware, progress)
        check_runnable(machine.device)
        bf16 = False if workload.precision is not None else bf16  # rungs in bf16 would override the precision that was given
        slow = slowness_of_bf16(machine.device) if bf16 is None else 0.0
        made = Ladder(
            source=workload.source,
            machine=machine,
            batch=batch,
            seq=seq,
            steps=steps,
            budget=budget,
            first=Settings(dtype=workload.dtype, precision=workload.precision, optimizer=optimizer),
            narrow=slow < _TOO_SLOW if bf16 is None else bf16,
            progress=progress,
        )
        asked = _asked(recipes)
        climbed = list(made.climb(everything=everything or budget is None))
        narrowed = list(made.recipes(asked))
    records = [made.record(step) for step in (*climbed, *narrowed)]
    if csv is not None:
        write_csv(csv, records)
    if json:
        show_json(records)
    else:
        _show(made, climbed, records[: len(climbed)])
        if narrowed:
            _show_recipes(climbed[0], narrowed)
        if slow >= _TOO_SLOW:
            say(f"a matmul in bf16 takes {slow:.0f} times as long as in float32 here: bf16 rungs are skipped (see --bf16)")
        if csv is not None:
            say(f"written to {csv}")
    if not any(step.fits for step in climbed) or not all(step.keeps_its_word for step in climbed):
        raise typer.Exit(FAILED)


def _asked(text: str) -> list[str]:
    """Recipes by name; those that a plan does not take are refused."""
    from holdall.precision import find, names, plannable

    if text == "all":
        return [n for n in names() if n not in ("fp32", "layerwise") and not find(n, alone=False).obstacle]
    asked = [n.strip() for n in text.split(",") if n.strip()]
    for name in asked:
        plannable(name)
    return asked


def _show_recipes(plain: LadderStep, narrowed: Sequence[LadderStep]) -> None:
    say()
    table = grid("precision", "kept", "peak", "loss", "", left=1)
    first = plain.run.losses[-1] if plain.run else None
    for step in (plain, *narrowed):
        name = f"{step.settings.precision or step.settings.dtype}"
        if step.run is None or step.peak is None or step.kept is None:
            add_row(table, name, *[_UNCOUNTED] * 3, cell(""))
            continue
        last = step.run.losses[-1]
        change = "" if step is plain or not first else f"{last / first - 1:+.2%}" if isfinite(last) else "diverged"
        add_row(table, name, format_bytes(step.kept), format_bytes(step.peak), f"{last:.4f}", change)
    show(table)
    for step in narrowed:
        if step.problem:
            say(f"{step.rung.name}: not run: {step.problem}")


def _show(made: Ladder, climbed: Sequence[LadderStep], records: Sequence[dict[str, Any]]) -> None:
    say(f"{made.source.name}, batch {made.batch} x {made.seq} tokens, {made.steps} steps, on {made.machine.name}\n")
    table = grid("", "numerics", "peak", "", "tokens/s", "", "loss", "fits", left=2)
    before: dict[str, Any] = {}
    for step, record in zip(climbed, records, strict=True):
        add_row(table, *_cells(step, record, before))
        before = record if step.run else before
    show(table)
    say()
    for step in climbed:
        say(f"{step.rung.name}: {step.rung.says}" + (f"; not run: {step.problem}" if step.problem else ""))
    say()
    first = next((step for step in climbed if step.fits), None)
    say(f"the first that fits: {first.rung.name}" if first else "none fits the budget")
    for step in climbed:
        if not step.keeps_its_word:
            say(f"note: {step.rung.name} should be exact, but its losses or weights DIFFER from those of the rung before")


def _cells(step: LadderStep, record: dict[str, Any], before: dict[str, Any]) -> list[Any]:
    if step.run is None or step.peak is None:
        return [step.rung.name, step.rung.numerics, *[_UNCOUNTED] * 5, cell("--")]
    return [
        step.rung.name,
        step.rung.numerics,
        format_bytes(step.peak),
        _change(record["peak_bytes"], before.get("peak_bytes")),
        f"{record['tokens_per_second']:,.0f}",
        _change(record["tokens_per_second"], before.get("tokens_per_second")),
        f"{record['final_loss']:.4f}",
        "yes" if step.fits else "no",
    ]


def _change(now: float, before: float | None) -> str:
    """The change from the rung before."""
    return "" if not before else f"{now / before - 1:+.0%}"
