"""The training loop of `holdall train`: a plain PyTorch loop inside trace, plan, apply and report.

    describe -> read the data -> build -> (resume) -> trace -> plan -> apply -> steps -> report

A step depends on the weights, the optimizer's state, the generators and the position in the data; a checkpoint holds
these four, so an interrupted run ends with the same bits as an uninterrupted one, under this budget or another.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from holdall import api, models
from holdall.errors import HoldallError, InvalidInput, OverBudget, Unsupported
from holdall.runtime.harness import Harness
from holdall.training import TrainOptions, TrainResult
from holdall.training.checkpoint import (
    Checkpoint,
    check_can_save,
    check_continues,
    latest_checkpoint,
    load_optimizer,
    restore_random,
    save_checkpoint,
)
from holdall.training.data import Encoder, Sequences, load_sequences, make_encoder
from holdall.training.machine import resolve_device, resolve_machine
from holdall.training.optimizer import make_optimizer, make_schedule, settled
from holdall.types import Progress
from holdall.types._json import write_text
from holdall.types.plan import silent
from holdall.units import format_bytes

Metrics = dict[str, Any]
"""One step: a line of `metrics.jsonl`. Sizes in bytes, times in seconds; `eval_loss` only where it was measured."""


def run_training(
    options: TrainOptions, *, progress: Progress = silent, on_metrics: Callable[[Metrics], None] | None = None
) -> TrainResult:
    """Train, and write checkpoints, `metrics.jsonl` and the report into `options.out`.

    `progress` receives the stages and steps in words, `on_metrics` each step's figures. The caller's random state is restored.
    """
    options = settled(options)
    source = _causal_lm(options.model)
    device = resolve_device(options.device)
    models.sample_batch(source, batch=1, seq=options.seq)  # refuses a sequence longer than the model's positions
    machine = resolve_machine(options, device)
    found = _checkpoint_to_resume(options)
    progress("reading the data", 0, 0, "")
    encoder = make_encoder(source.folder)
    data = load_sequences(
        options.data,
        encoder,
        seq=options.seq,
        vocabulary=source.config.vocab_size,
        seed=options.seed,
        eval_fraction=options.eval_fraction,
        field=options.field,
    )
    notes = check_continues(found, _fixed(options, source.name, data), _settings(options)) if found else []
    notes += _missing_from(source, encoder)
    if found is not None and found.step >= options.steps:
        notes.append(f"nothing to do: the run is at step {found.step} of {options.steps}")
        done = found.step
        return TrainResult(model=source.name, steps=done, checkpoint=found.folder, resumed_from=done, notes=tuple(notes))
    with _private_random(device), _quiet_transformers():
        progress("building the model", 0, 0, "")
        origin = source if found is None else models.describe(found.folder)
        model: Any = models.build(origin, device="cpu", dtype=options.dtype, seed=options.seed)  # what goes to a GPU is planned
        optimizer = make_optimizer(model, options)
        if found is not None:
            load_optimizer(found, model, optimizer)
        check_can_save(options.out, model)
        progress("tracing and planning", 0, 0, "")
        with api.fit(
            model,
            optimizer,
            data.batch(0, options.batch, device),
            loss=partial(_share_of_loss, options.accumulate),
            budget=options.budget,
            planner=options.planner,
            hardware=machine,
            device=device,
            accumulate=options.accumulate,
            record=options.record,
            compile=options.compile,
            precision=options.precision,
            progress=progress,
        ) as harness:
            run = _Run(
                options=options,
                name=source.name,
                device=device,
                model=model,
                optimizer=optimizer,
                data=data,
                encoder=encoder,
                harness=harness,
                found=found,
                notes=notes,
                progress=progress,
                on_metrics=on_metrics or (lambda _: None),
            )
            return _train(run)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Everything that is constant over the steps."""

    options: TrainOptions
    name: str
    device: str
    model: Any
    optimizer: torch.optim.Optimizer
    data: Sequences
    encoder: Encoder
    harness: Harness
    found: Checkpoint | None
    notes: list[str]
    progress: Progress
    on_metrics: Callable[[Metrics], None]

    @property
    def budget(self) -> int:
        return next(iter(self.harness.plan.budget.values()))

    @property
    def predicted_peak(self) -> int:
        return next(iter(self.harness.plan.predicted.peak.values()))


def _train(run: _Run) -> TrainResult:
    options, harness = run.options, run.harness
    start, position = 0, 0
    if run.found is None:
        torch.manual_seed(options.seed)
    else:
        start, position = run.found.step, int(run.found.about()["position"])
        restore_random(run.found)  # after tracing and planning, which may draw numbers of their own
    scheduler = make_schedule(run.optimizer, options, start)
    rows: list[Metrics] = []
    checkpoint = options.out
    with _metrics_file(options.out / "metrics.jsonl", start) as write:
        for step in range(start + 1, options.steps + 1):
            row = _measured_step(run, step, position, scheduler)
            position += options.batch * options.accumulate
            last = step == options.steps
            if len(run.data.held_out) and (last or _is_due(step, options.eval_every)):
                run.progress("evaluating", step, options.steps, "")
                row["eval_loss"] = _evaluate(run)
                _check_finite("held-out loss", row["eval_loss"], step, options)
            rows.append(row)
            write(row)
            run.on_metrics(row)
            run.progress("training", step, options.steps, _in_words(row))
            if last or _is_due(step, options.save_every):
                checkpoint = _save(run, step, position)
    report = harness.report()
    for ending in ("html", "json"):
        report.save(options.out / f"report.{ending}")
    evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return TrainResult(
        model=run.name,
        steps=options.steps,
        resumed_from=run.found.step if run.found else None,
        seconds=sum(row["seconds"] for row in rows),
        tokens=len(rows) * options.tokens_per_step,
        first_loss=rows[0]["loss"],
        loss=rows[-1]["loss"],
        eval_loss=evaluated[-1] if evaluated else None,
        peak_bytes=max(row["peak_bytes"] for row in rows),
        predicted_peak_bytes=run.predicted_peak,
        budget_bytes=run.budget,
        checkpoint=checkpoint,
        report=options.out / "report.html",
        notes=(*run.notes, *harness.notes),
    )


def _measured_step(run: _Run, step: int, position: int, scheduler: LambdaLR) -> Metrics:
    rate = scheduler.get_last_lr()[0]
    began = time.perf_counter()
    try:
        loss, norm = _step(run, step, position)
    except torch.OutOfMemoryError as error:
        raise OverBudget(
            f"step {step} ran out of memory within {format_bytes(run.budget)}: {str(error).splitlines()[0]}",
            hint="use a larger budget, a smaller batch or a shorter sequence",
        ) from error
    seconds = time.perf_counter() - began
    scheduler.step()
    return {
        "step": step,
        "loss": loss,
        "gradient_norm": norm,
        "learning_rate": rate,
        "tokens": run.options.tokens_per_step,
        "seconds": seconds,
        "tokens_per_second": run.options.tokens_per_step / seconds,
        "peak_bytes": run.harness.step_peaks[-1],
        "predicted_peak_bytes": run.predicted_peak,
        "budget_bytes": run.budget,
    }


def _step(run: _Run, step: int, position: int) -> tuple[float, float]:
    """One update: (loss, gradient norm before clipping). If either is not finite, it raises before the update."""
    options = run.options
    mean = 0.0
    for nth in range(options.accumulate):
        batch = run.data.batch(position + nth * options.batch, options.batch, run.device)
        loss = _share_of_loss(options.accumulate, run.model, batch)
        loss.backward()
        mean += loss.item()
        del loss, batch  # free them before the next forward
    _check_finite("loss", mean, step, options)
    norm = float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), options.clip or math.inf))
    _check_finite("norm of the gradient", norm, step, options)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return mean, norm


def _share_of_loss(parts: int, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss / parts if parts > 1 else loss


def _check_finite(what: str, value: float, step: int, options: TrainOptions) -> None:
    if not math.isfinite(value):
        raise _diverged(f"the {what} is {value}", step, options)


def _diverged(what: str, step: int, options: TrainOptions) -> HoldallError:
    before = latest_checkpoint(options.out)
    kept = f"the checkpoint of step {before.step} is intact" if before else "nothing was saved"
    hint = f"try a learning rate below {options.lr:g}, a longer warmup, or --clip 1"
    return HoldallError(f"{what} at step {step}; training stopped, {kept}", hint=hint)


def _evaluate(run: _Run) -> float:
    """The mean loss over the held-out data."""
    total = 0.0
    run.model.eval()
    try:
        with torch.no_grad():
            for batch in run.data.held_out_batches(run.options.batch, run.device):
                total += float(run.model(**batch).loss) * len(batch["input_ids"])
    finally:
        run.model.train()
    return total / len(run.data.held_out)


def _save(run: _Run, step: int, position: int) -> Path:
    options, ledger = run.options, run.harness.ledger
    run.progress("saving", step, options.steps, "")
    for parameter in run.model.parameters():
        # the loss was finite before this update; the extremes of the weights show whether the next one will be
        if not all(math.isfinite(end) for end in torch.aminmax(parameter.detach())):
            raise _diverged("the weights are no longer finite", step, options)
    about = {"position": position, "same": _fixed(options, run.name, run.data), "settings": _settings(options)}
    with ledger.paused() if ledger is not None else nullcontext():  # saving is not part of a planned step
        return save_checkpoint(
            options.out,
            step,
            model=run.model,
            optimizer=run.optimizer,
            about=about,
            keep=options.keep,
            tokenizer=run.encoder.tokenizer,
        )


def _fixed(options: TrainOptions, name: str, data: Sequences) -> dict[str, Any]:
    """What a resumed run must share with the one that it continues."""
    fixed = {"model": name, "dtype": options.dtype, "seed": options.seed, "data or sequence length": data.fingerprint}
    named = {"optimizer": options.optimizer, "precision": options.precision}
    return fixed | {key: value for key, value in named.items() if value not in ("adamw", None)}  # files from before lack them


def _settings(options: TrainOptions) -> dict[str, Any]:
    """Options that a resumed run may change, at the cost of other results than an uninterrupted run."""
    names = ("batch", "accumulate", "steps", "lr", "weight_decay", "warmup", "clip")
    return {**{name: getattr(options, name) for name in names}, "betas": list(options.betas)}


# before the first step


def _checkpoint_to_resume(options: TrainOptions) -> Checkpoint | None:
    found = latest_checkpoint(options.out)
    if found is not None and not options.resume:
        raise InvalidInput(
            f"`{options.out}` already holds a checkpoint of step {found.step}",
            hint="use `resume=True` (`--resume`), or choose another folder",
        )
    return found


def _causal_lm(name: str) -> models.ModelSource:
    source = models.describe(name)
    if source.task != "causal-lm":
        raise Unsupported(f"{name} is a {source.task} model", hint="`train` needs a causal language model")
    return source


def _missing_from(source: models.ModelSource, encoder: Encoder) -> list[str]:
    """Warnings about missing files of a folder, which would otherwise show only in the loss."""
    if source.folder is None:
        return []
    weights = any(source.folder.glob("*.safetensors"))
    missing = {
        "weights: training begins with random ones": weights,
        "tokenizer: each byte of the text is a token": encoder.tokenizer is not None,
    }
    return [f"`{source.folder}` holds no {what}" for what, is_there in missing.items() if not is_there]


# surroundings


@contextmanager
def _metrics_file(path: Path, start: int) -> Iterator[Callable[[Metrics], None]]:
    """Append one line per step, after removing the lines of steps that will be run again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    write_text(path, "".join(f"{line}\n" for line in lines if _step_of(line) in range(1, start + 1)))
    with path.open("ab", buffering=0) as file:  # unbuffered: closing has nothing left to write

        def write(row: Metrics) -> None:
            try:
                file.write(f"{json.dumps(row)}\n".encode())
            except OSError as error:
                raise HoldallError(f"cannot write `{path}`: {error.strerror}", hint="free some space, then resume") from error

        yield write


def _step_of(line: str) -> int:
    """The step of a line; -1 for one that was cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _in_words(row: Mapping[str, Any]) -> str:
    memory = f"{format_bytes(row['peak_bytes'])} of {format_bytes(row['budget_bytes'])}"
    return f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s, {memory}"


@contextmanager
def _private_random(device: str) -> Iterator[None]:
    """The run has its own random numbers; the caller's are restored."""
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpu else ()):
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Turn off progress bars of transformers, which would overwrite the caller's."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
