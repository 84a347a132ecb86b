"""The checkpoints of `holdall train`: those of `holdall/checkpoints`, with the run's options."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdall import checkpoints
from holdall.checkpoints import folders, states
from holdall.checkpoints.tensors import save_file
from holdall.errors import InvalidInput
from holdall.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint of a run."""

    folder: Path
    step: int

    def about(self) -> dict[str, Any]:
        """The `about` passed to `save_checkpoint`."""
        about: dict[str, Any] = _read(self)["about"]
        return about


def latest_checkpoint(out: Path) -> Checkpoint | None:
    """The complete checkpoint saved last; None: there is none. Incomplete and damaged ones are skipped."""
    found = folders.latest(out)
    return None if found is None else Checkpoint(folder=found[0], step=found[1])


def check_can_save(out: Path, model: Any) -> None:
    """Refuse at the start what would make the first save fail hours later."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise InvalidInput(f"cannot write to `{out}`: {error.strerror}", hint="choose another folder") from error
    needed = sum(p.nbytes * (3 if p.requires_grad else 1) for p in model.parameters())  # AdamW keeps two states per parameter
    if free < needed:
        have = f"a checkpoint takes {format_bytes(needed)}, but `{out}` has {format_bytes(free)} free"
        raise InvalidInput(have, hint="free some space or choose another folder")
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInput(
            f"the model's generation config cannot be saved: {reason}", hint="correct the model's generation_config.json"
        ) from error


def save_checkpoint(
    out: Path,
    step: int,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    keep: int,
    tokenizer: Any = None,
) -> Path:
    """Write the checkpoint of a step, then remove all but the last `keep`. `about`: plain data, returned on resume.

    The run draws from torch's generators only; those of Python and numpy belong to the caller.
    """
    return checkpoints.write_checkpoint(
        out,
        step,
        model=model,
        optimizer=optimizer,
        about={"about": dict(about)},
        rng="torch",
        keep=keep,
        tokenizer=tokenizer,
        save=save_file,
    )


def check_continues(checkpoint: Checkpoint, same: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Refuse to continue a different run than the checkpoint's; returns sentences about changed settings.

    Compares with `about["same"]` and `about["settings"]` of the checkpoint.
    """
    about = checkpoint.about()
    for key, now in same.items():
        if about["same"].get(key) != now:
            raise InvalidInput(
                f"the {key} of this run is not that of the checkpoint `{checkpoint.folder}`",
                hint="use the original value, or choose another folder for a new run",
            )
    before = about["settings"]
    changed = {key: now for key, now in settings.items() if before.get(key) != now}
    return [f"resumed with {key} {now}, which was {before.get(key)}" for key, now in changed.items()]


def load_optimizer(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state, one tensor at a time. Its settings are the caller's options."""
    about = _read(checkpoint)["optimizer"]
    found = states.check_optimizer(checkpoint.folder, about, model, optimizer)
    states.read_optimizer(about, found, model, optimizer, settings=False)


def restore_random(checkpoint: Checkpoint) -> None:
    """Restore torch's generators; skips devices that are not present."""
    states.read_random(checkpoint.folder, {})


def _read(checkpoint: Checkpoint) -> dict[str, Any]:
    return checkpoints.Checkpoint(folder=checkpoint.folder, step=checkpoint.step).about()
