"""Checkpoints independent of the plan: plain files that other tools can read.

    OUT/latest                               a link to the last one
    OUT/checkpoints/step-000300/
      config.json, model*.safetensors, ...   as `save_pretrained` writes them (and the tokenizer, if there is one):
                                             `from_pretrained(folder)` loads the model; otherwise just `model.safetensors`
      optimizer.safetensors                  the optimizer's tensors, named `<parameter>.<key>`: `lm_head.weight.exp_avg`
      random.safetensors                     states of torch's generators: `cpu`, `cuda:0`, ...
      training.json                          step, scheduler, position in the data, the optimizer's parameter groups with the
                                             names of their parameters, and values of its state that are not tensors
      complete.json                          written last: the files and their sizes; without it there is no checkpoint

A checkpoint holds no budget and no plan, so a run can continue under another, or without it. No pickle. Tensors are written
from their place in memory and read into their place, one at a time. To load the optimizer without holdall:

    about = json.load(open(folder + "/training.json"))["optimizer"]
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{**g, "params": [named[n] for n in g["params"]]} for g in about["groups"]])
    for key, value in safetensors.torch.load_file(folder + "/optimizer.safetensors").items():
        name, _, field = key.rpartition(".")
        optimizer.state[named[name]][field] = value        # moved to the parameter's device, except `step`

`folders.py` explains how a folder becomes complete, and what a killed run leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdall.checkpoints import folders, states
from holdall.checkpoints.folders import ABOUT
from holdall.checkpoints.over_ranks import SHARDED, load_over_ranks, save_over_ranks
from holdall.checkpoints.plain import pack, unpack
from holdall.checkpoints.tensors import save_file
from holdall.errors import InvalidInput
from holdall.sharded import in_stages, is_in_shards
from holdall.types import _json

log = logging.getLogger("holdall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk. `data`: the plain data passed to `save_checkpoint`, if any."""

    folder: Path
    step: int
    data: Any = None
    notes: tuple[str, ...] = ()  # incomplete checkpoints that were skipped

    def about(self) -> dict[str, Any]:
        """All of `training.json`."""
        return _json.read(self.folder / ABOUT, folders.FORMAT)


def save_checkpoint(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scheduler: Any = None,
    data: Any = None,
    rng: bool = True,
    keep: int | None = None,
    tokenizer: Any = None,
) -> Path:
    """Write a checkpoint into the run's folder `path`, between two steps, with or without a plan; returns its folder.

    `scheduler`: any object with a `state_dict()`. `data`: the loop's position in its data: such an object, a `torch.Generator`,
    or plain data. `rng`: also save the states of the global generators. `keep`: remove all but this many, once this one is
    complete.
    """
    if step < 0:
        raise InvalidInput(f"`step` is {step}, but steps are counted from 0", hint="pass the number of finished steps")
    if keep is not None and keep < 1:
        raise InvalidInput(f"`keep` is {keep}, but the checkpoint just saved is one", hint="use 1 or more, or None for all")
    about = {
        "scheduler": None if scheduler is None else pack(_state_of(scheduler), "`scheduler`"),
        "data": pack(_state_of(data), "`data`"),
    }
    return write_checkpoint(
        Path(path), step, model=model, optimizer=optimizer, about=about, rng=rng, keep=keep, tokenizer=tokenizer
    )


def load_checkpoint(
    path: str | Path,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    data: Any = None,
    rng: bool = True,
) -> Checkpoint | None:
    """Restore model, optimizer, scheduler, data position and random numbers; None: there is no checkpoint.

    `path`: a run's folder, whose last complete checkpoint is used, or the folder of one checkpoint. Arguments left out are not
    restored. Everything is compared before anything is changed. Load right before the loop: building, tracing and planning may
    draw random numbers.
    """
    found = find_checkpoint(Path(path))
    if found is None:
        return None
    for note in found.notes:
        log.warning("holdall: %s", note)
    about = found.about()
    in_shards = (found.folder / SHARDED).is_dir()
    if model is not None and (in_stages(model) or is_in_shards(model)) and not in_shards:
        hint = "load it into the model before `fit(..., mesh=...)` shards it, or `holdall.pipelines.start` cuts it"
        raise InvalidInput(f"`{found.folder}` is of a model that is whole, and this one is in shards", hint=hint)
    with states.unobserved():
        weights = states.check_weights(found.folder, model) if model is not None and not in_shards else []
        if optimizer is not None and model is None:
            hint = "pass both: its state is stored by parameter name"
            raise InvalidInput("an optimizer cannot be loaded without its model", hint=hint)
        if optimizer is not None and not in_shards:
            entries = states.check_optimizer(found.folder, about["optimizer"], model, optimizer)
        if scheduler is not None and about.get("scheduler") is None:
            raise InvalidInput(f"`{found.folder}` holds no scheduler", hint="it was saved without one: leave out `scheduler=`")
        if rng and about.get("random") is None:
            raise InvalidInput(f"`{found.folder}` holds no random numbers", hint="it was saved without: use `rng=False`")
        position = unpack(about.get("data"), ABOUT)
        _check_position(found.folder, position, data)
        states.read_weights(weights)
        if in_shards:
            load_over_ranks(found.folder, about, model=model, optimizer=optimizer, rng=rng)
        if scheduler is not None:
            scheduler.load_state_dict(unpack(about["scheduler"], ABOUT))
        if optimizer is not None and not in_shards:
            states.read_optimizer(about["optimizer"], entries, model, optimizer)
        if isinstance(data, torch.Generator):
            data.set_state(position)
        elif data is not None:
            data.load_state_dict(position)
        if rng and not in_shards:
            states.read_random(found.folder, about["random"])
    return Checkpoint(folder=found.folder, step=found.step, data=position, notes=found.notes)


def find_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or the last complete one of the run there; its notes name skipped ones."""
    if (path / folders.MARKER).exists() or (path / ABOUT).exists():
        step = folders.step_of(path)
        if step is None:
            what = f"`{path}` is not complete: a file of it is missing or cut off"
            raise InvalidInput(what, hint="pass the folder of the run: its last complete checkpoint is used")
        return Checkpoint(folder=path, step=step)
    latest = folders.latest(path)
    passed_over = [f"`{folder}` is not complete and was ignored" for folder in folders.incomplete_folders(path)]
    if latest is None:
        for note in passed_over:
            log.warning("holdall: %s", note)
        return None
    return Checkpoint(folder=latest[0], step=latest[1], notes=tuple(passed_over))


def write_checkpoint(
    out: Path,
    step: int,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    about: Mapping[str, Any],
    rng: bool | str = True,
    keep: int | None = None,
    tokenizer: Any = None,
    save: states.SaveFile = save_file,
) -> Path:
    """As `save_checkpoint`. `about`: already packed. `rng="torch"`: torch's generators. `save`: writes all files but the
    weights.
    """
    final = folders.folder_of(out, step)
    if in_stages(model) or is_in_shards(model):
        with states.unobserved():
            new = partial(folders.new_folder, out, step)
            save_over_ranks(new, step, model=model, optimizer=optimizer, about=about, rng=bool(rng))
        if _is_first():
            _clear(out, keep, final)
        return final
    with states.unobserved(), folders.new_folder(out, step) as folder:
        states.write_weights(folder, model)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        rest = {
            "optimizer": states.write_optimizer(folder, model, optimizer, save) if optimizer is not None else None,
            "random": states.write_random(folder, save, only_torch=rng == "torch") if rng else None,
        }
        _json.write(folder / ABOUT, {"format": folders.FORMAT, "step": step, **about, **rest})
    _clear(out, keep, final)
    return final


def _clear(out: Path, keep: int | None, newest: Path) -> None:
    if keep is None:
        folders.clear_left_over(out)
    else:
        folders.keep_last(out, keep, newest)


def _is_first() -> bool:
    """Is this the first rank of those that write together, or the only one?"""
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _check_position(folder: Path, position: Any, data: Any) -> None:
    if data is None:
        return
    if position is None:
        raise InvalidInput(f"`{folder}` holds no position in the data", hint="it was saved without one: leave out `data=`")
    if not isinstance(data, torch.Generator) and not hasattr(data, "load_state_dict"):
        hint = "leave out `data=`, and read `.data` of what `load_checkpoint` returns"
        raise InvalidInput(f"`data` is a {type(data).__name__}, which cannot be set to a position", hint=hint)


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value
