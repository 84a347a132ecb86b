"""What a run needs to go on, in plain files that anything can read.

    checkpoints/step-000300/
      config.json, model*.safetensors, ...   as `save_pretrained` writes them (and the tokenizer, where there is one):
                                             `AutoModelForCausalLM.from_pretrained(folder)` loads the model
      optimizer.safetensors                  the optimizer's tensors, named `<parameter>.<key>`: `lm_head.weight.exp_avg`
      random.safetensors                     states of torch's generators: `cpu`, `cuda:0`, ...
      training.json                          step, position in the data, settings, and the optimizer's parameter groups with
                                             the names of their parameters, and values of its state that are not tensors
      complete.json                          written last: the files and their sizes; without it there is no checkpoint

No budget and no plan is in it, so a run may go on under another. There is no pickle. The optimizer without holdall:

    about = json.load(open(folder + "/training.json"))["optimizer"]
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{**g, "params": [named[n] for n in g["params"]]} for g in about["groups"]])
    for key, value in safetensors.torch.load_file(folder + "/optimizer.safetensors").items():
        name, _, field = key.rpartition(".")
        optimizer.state[named[name]][field] = value        # moved to the parameter's device, `step` excepted

A checkpoint is written beside its place under a name ending in `.tmp`, brought to the disk, and then renamed: one that was
interrupted is never taken for one. Nothing that exists is touched before the new one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from holdall.errors import HoldallError, InvalidInput
from holdall.types import _json
from holdall.units import format_bytes

FORMAT = "holdall-checkpoint-1"

_WEIGHTS_OF_OPTIMIZER, _RANDOM = "optimizer.safetensors", "random.safetensors"
_ABOUT, _MARKER = "training.json", "complete.json"
_UNFINISHED = ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int

    def about(self) -> dict[str, Any]:
        """What `save_checkpoint` was told."""
        about: dict[str, Any] = _json.read(self.folder / _ABOUT, FORMAT)["about"]
        return about


def latest_checkpoint(out: Path) -> Checkpoint | None:
    """The complete checkpoint of the latest step; None: there is none. Half-written and damaged ones are passed over."""
    return max(_complete(out), key=lambda c: c.step, default=None)


def check_can_save(out: Path, model: Any) -> None:
    """Refuse at the start what would make the first save fail hours later."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise InvalidInput(f"cannot write to `{out}`: {error.strerror}", hint="choose another folder") from error
    needed = sum(p.nbytes * (3 if p.requires_grad else 1) for p in model.parameters())  # AdamW keeps two of each
    if free < needed:
        have = f"a checkpoint takes {format_bytes(needed)}, but `{out}` has {format_bytes(free)} free"
        raise InvalidInput(have, hint="free some space or choose another folder")
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInput(f"the model's generation config cannot be saved: {reason}", hint="mend that file") from error


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
    """Write the checkpoint of a step, then take away all but the last `keep`. `about`: plain data, handed back on resume."""
    final = out / "checkpoints" / f"step-{step:06d}"
    partial = final.with_name(final.name + _UNFINISHED)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_files(partial, model, optimizer, tokenizer, {"step": step, "about": dict(about)})
        _write_marker(partial, step)
        if final.exists():
            _remove(final)
        os.rename(partial, final)
        _to_disk(final.parent)
    except (OSError, SafetensorError, InvalidInput) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _cannot_save(out, step, error) from error
    _keep_last(out, keep)
    return final


def check_continues(checkpoint: Checkpoint, same: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with another run than the checkpoint's; what was changed in this one is returned in sentences.

    Compares with `about["same"]` and `about["settings"]` of the checkpoint.
    """
    about = checkpoint.about()
    for key, now in same.items():
        if about["same"].get(key) != now:
            raise InvalidInput(
                f"the {key} of this run is not that of the checkpoint `{checkpoint.folder}`",
                hint="use what the run began with, or choose another folder for a new run",
            )
    before = about["settings"]
    changed = {key: now for key, now in settings.items() if before.get(key) != now}
    return [f"resumed with {key} {now}, which was {before.get(key)}" for key, now in changed.items()]


def load_optimizer(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Bring the optimizer's state back, one tensor at a time. Its settings stay as they are: the caller's options rule."""
    named = dict(model.named_parameters())
    about = _json.read(checkpoint.folder / _ABOUT, FORMAT)["optimizer"]
    path = checkpoint.folder / _WEIGHTS_OF_OPTIMIZER
    if about["type"] != type(optimizer).__name__:
        raise _damaged(path, f"it is the state of {about['type']}, not of {type(optimizer).__name__}")
    for name, values in about["state"].items():
        optimizer.state[_parameter(named, name, path)].update(values)
    try:
        with safe_open(path, framework="pt") as file:
            for entry in file.keys():  # noqa: SIM118  it is a file, not a mapping
                name, _, key = entry.rpartition(".")
                parameter = _parameter(named, name, path)
                # a copy of its own: what the file hands out may be a view of the whole file
                value = file.get_tensor(entry).clone()
                optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def restore_random(checkpoint: Checkpoint) -> None:
    """Set torch's generators as they were; those of devices that are not here are left out."""
    path = checkpoint.folder / _RANDOM
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name == "cpu":
                    torch.set_rng_state(file.get_tensor(name).clone())
                elif int(name.partition(":")[2]) < torch.cuda.device_count():
                    torch.cuda.set_rng_state(file.get_tensor(name).clone(), name)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _write_files(folder: Path, model: Any, optimizer: torch.optim.Optimizer, tokenizer: Any, about: Mapping[str, Any]) -> None:
    with _able_to_generate(model):
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    tensors, described = _describe_optimizer(model, optimizer)
    save_file(tensors, folder / _WEIGHTS_OF_OPTIMIZER)
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    save_file(states, folder / _RANDOM)
    _json.write(folder / _ABOUT, {"format": FORMAT, **about, "optimizer": described})


def _describe_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Its tensors by name, and the rest of it as plain data."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = value.detach().contiguous()
            else:
                rest.setdefault(name, {})[key] = value
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return tensors, {"type": type(optimizer).__name__, "groups": groups, "state": rest}


@contextmanager
def _able_to_generate(model: Any) -> Iterator[None]:
    """Training keeps no keys and values; a model saved so would generate without them ever after, token by token anew."""
    configs: list[Any] = [model.config, getattr(model, "generation_config", None)]
    asleep = [c for c in configs if getattr(c, "use_cache", None) is False]
    for config in asleep:
        config.use_cache = True
    try:
        yield
    finally:
        for config in asleep:
            config.use_cache = False


def _write_marker(folder: Path, step: int) -> None:
    """Bring every file to the disk, then say that they are all there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _to_disk(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    _json.write(folder / _MARKER, {"format": FORMAT, "step": step, "files": sizes})
    _to_disk(folder)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _complete(out: Path) -> list[Checkpoint]:
    found = []
    for marker in (out / "checkpoints").glob(f"step-*/{_MARKER}"):
        folder = marker.parent
        if folder.name.endswith(_UNFINISHED):
            continue
        try:
            said = json.loads(marker.read_text(encoding="utf-8"))
            whole = said["format"] == FORMAT and all((folder / n).stat().st_size == s for n, s in said["files"].items())
            step = int(said["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if whole:
            found.append(Checkpoint(folder=folder, step=step))
    return found


def _keep_last(out: Path, keep: int) -> None:
    """Old checkpoints go, and what interrupted runs left; that they could not be removed is no reason to stop."""
    for old in sorted(_complete(out), key=lambda c: c.step)[:-keep]:
        _remove(old.folder)
    for left in (out / "checkpoints").glob(f"*{_UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Renamed first, so that a removal that is interrupted does not leave a checkpoint that looks complete."""
    doomed = folder.with_name(f"{folder.name}.old{_UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        os.rename(folder, doomed)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def _parameter(named: Mapping[str, torch.nn.Parameter], name: str, path: Path) -> torch.nn.Parameter:
    if name not in named:
        raise _damaged(path, f"the model has no parameter `{name}`")
    return named[name]


def _damaged(path: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"cannot go on from `{path}`: {reason.splitlines()[0]}", hint="remove that checkpoint to go on from the one before"
    )


def _cannot_save(out: Path, step: int, error: Exception) -> HoldallError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(getattr(error, "fact", error))
    before = latest_checkpoint(out)
    kept = f"the one of step {before.step} is intact" if before else "there is none before it"
    hint = "free some space or mend the folder, then run the same command again: it goes on from the last checkpoint"
    return HoldallError(f"cannot save the checkpoint of step {step}: {reason.splitlines()[0]}; {kept}", hint=hint)
