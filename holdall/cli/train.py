"""`holdall train`: fine-tune a local model, or train a preset from scratch, on a text file and inside a budget."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdall.cli import _options as given
from holdall.cli._console import facts, show, show_json
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from holdall.training import TrainResult
    from holdall.types import Progress

_Watchers = tuple["Progress", Callable[[dict[str, Any]], None]]


def train(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A local Hugging Face folder to fine-tune, or a preset to train anew.")
    ],
    *,
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help="Text, or JSONL with one document per line.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where checkpoints, metrics and the report go.")],
    budget: given.Budget = "auto",
    planner: given.Planner = "auto",
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Plan with a GPU's datasheet, or a file of `holdall probe --out`."),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cuda or cpu. auto: a GPU if there is one.")] = "auto",
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="N", help="Sequences in one forward.")] = 4,
    seq: Annotated[int, typer.Option("--seq", "-s", metavar="N", help="Tokens in one sequence.")] = 512,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Updates in all, those before a resume included.")] = 100,
    accumulate: Annotated[int, typer.Option("--accumulate", metavar="N", help="Forwards in one update.")] = 1,
    optimizer: given.Rule = "adamw",
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr", metavar="X", help="Learning rate after the warmup. [1e-4; else the optimizer's own]", show_default=False
        ),
    ] = None,
    weight_decay: Annotated[float, typer.Option("--weight-decay", metavar="X", help="Of matrices, not of norms.")] = 0.01,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", help="Updates until the full learning rate.")] = 10,
    clip: Annotated[float, typer.Option("--clip", metavar="X", help="Largest norm of the whole gradient; 0: off.")] = 1.0,
    eval_every: Annotated[int, typer.Option("--eval-every", metavar="N", help="Updates; 0: at the end only.")] = 0,
    eval_fraction: Annotated[float, typer.Option("--eval-fraction", metavar="X", help="Held out from the file's end.")] = 0.05,
    save_every: Annotated[int, typer.Option("--save-every", metavar="N", help="Updates; 0: at the end only.")] = 100,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="Checkpoints to keep.")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the last checkpoint in the folder, if there is one.")
    ] = True,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of weights, dropout and the order of the data.")] = 0,
    dtype: given.Dtype = "float32",
    precision: given.Precision = None,
    field: Annotated[str, typer.Option("--field", metavar="NAME", help="Field of a JSONL line that holds the text.")] = "text",
    fused: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile blocks; sums are then added in another order.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FOLDER", help="Write what was in memory there, should it run out."),
    ] = None,
    json: given.Json = False,
) -> None:
    """Train a causal language model inside a budget; run the same command again to continue after an interruption.

    Example: holdall train tiny-llama --data notes.txt --out run --seq 128 --budget 20MiB
    """
    from holdall.experiments.request import read_budget
    from holdall.experiments.workload import read_precision
    from holdall.training import TrainOptions
    from holdall.training.loop import run_training

    held, recipe = read_precision(dtype, precision)
    options = TrainOptions(
        model=model,
        data=data,
        out=out,
        budget=read_budget(budget),
        planner=planner,
        hardware=gpu,
        device=device,
        batch=batch,
        seq=seq,
        steps=steps,
        accumulate=accumulate,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        warmup=warmup,
        clip=clip,
        eval_every=eval_every,
        eval_fraction=eval_fraction,
        save_every=save_every,
        keep=keep,
        resume=resume,
        seed=seed,
        dtype=held,
        precision=recipe,
        field=field,
        compile=fused,
        record=record,
    )
    try:
        with _bar() if sys.stderr.isatty() else _lines(quiet=json) as (progress, on_metrics):
            result = run_training(options, progress=progress, on_metrics=on_metrics)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from the last checkpoint", err=True)
        raise
    if json:
        show_json(_plain(result))
    else:
        show(facts(_summary(result)))


def _summary(result: TrainResult) -> dict[str, object]:
    resumed = f", resumed at {result.resumed_from}" if result.resumed_from is not None else ""
    return {
        "model": result.model,
        "steps": f"{result.steps}{resumed}",
        "loss": "" if result.loss is None else f"{result.first_loss:.4f} -> {result.loss:.4f}",
        "held out": "" if result.eval_loss is None else f"{result.eval_loss:.4f}",
        "speed": "" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f} tokens/s",
        "time": "" if not result.seconds else f"{format_seconds(result.seconds)} for {result.tokens:,} tokens",
        **_memory(result),
        "checkpoint": result.checkpoint,
        "report": result.report or "",
        "notes": "; ".join(result.notes),
    }


def _memory(result: TrainResult) -> dict[str, object]:
    sizes = {"peak measured": result.peak_bytes, "predicted": result.predicted_peak_bytes, "budget": result.budget_bytes}
    return {label: format_bytes(size) for label, size in sizes.items() if size is not None}


def _plain(result: TrainResult) -> dict[str, Any]:
    """A value for `--json`, with paths as text."""
    values = {**dataclasses.asdict(result), "tokens_per_second": result.tokens_per_second}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


@contextmanager
def _bar() -> Iterator[_Watchers]:
    """A bar on stderr, with the figures of the last step behind it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, figures="")

        def told(what: str, done: int, total: int, best: str) -> None:  # noqa: ARG001
            bar.update(task, description=what, completed=done, total=total or None)

        def measured(row: dict[str, Any]) -> None:
            bar.update(task, figures=_figures(row))

        yield told, measured


@contextmanager
def _lines(*, quiet: bool) -> Iterator[_Watchers]:
    """About twenty lines on stderr instead of a bar, for log files."""

    def told(what: str, done: int, total: int, best: str) -> None:
        if what == "training" and not quiet and (done in (1, total) or done % max(1, total // 20) == 0):
            typer.echo(f"step {done}/{total}: {best}", err=True)

    yield told, lambda _: None


def _figures(row: dict[str, Any]) -> str:
    """The figures of a step in one line, short enough for eighty columns."""
    memory = f"{format_bytes(row['peak_bytes'])} of {format_bytes(row['budget_bytes'])}"
    return f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tok/s  {memory}"
