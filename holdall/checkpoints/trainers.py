"""What a trainer saves of a model in shards, in its own folders: whole weights, and optimizer states beside them.

A trainer writes weights from one process, as a file that holds a whole model. So ranks gather them one tensor at a time
(`whole_weights`), and put those of such a file into their shards (`read_whole_weights`). Optimizer states and schedule stay in
shards, in a folder beside the weights:

    CHECKPOINT/model.safetensors, ...         the trainer's own files
    CHECKPOINT/holdall/sharded/               the optimizer's states, as in `over_ranks.py`
    CHECKPOINT/holdall/training.json          its groups, the schedule
    CHECKPOINT/holdall/complete.json          written last; without it there are no states
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdall.checkpoints import folders
from holdall.checkpoints.over_ranks import load_over_ranks, save_over_ranks, spread_like
from holdall.checkpoints.plain import pack, unpack
from holdall.checkpoints.states import _HOW, check_weights, unobserved, unwrapped
from holdall.checkpoints.tensors import read_into
from holdall.errors import HoldallError, InvalidInput
from holdall.sharded import from_local, is_shard, local_of, part_of_parameter, spec_of, state_room
from holdall.types import _json

BESIDE = "holdall"
Optimizer = torch.optim.Optimizer


def whole_weights(model: Any, *, keep: bool) -> dict[str, Any]:
    """The `state_dict` of a model in shards, whole and in host memory; every rank calls it, and gets it with `keep`.

    One tensor at a time is whole on the device. Names of one tensor share one.
    """
    found: dict[str, Any] = {}
    made: dict[int, Any] = {}
    with unobserved(), torch.no_grad():
        for name, value in unwrapped(model).state_dict(keep_vars=True).items():
            if id(value) not in made:
                made[id(value)] = _whole(value, keep)
            found[name] = made[id(value)]
    return found if keep else {}


def read_whole_weights(folder: Path, model: Any) -> None:
    """Read the files of a whole model into one in shards, one tensor at a time; every rank calls it."""
    with unobserved(), torch.no_grad():
        for entry, tensor in check_weights(folder, model):
            if not is_shard(tensor):
                read_into(entry, tensor)
                continue
            whole = torch.empty(entry.shape, dtype=entry.dtype)
            read_into(entry, whole)
            local_of(tensor).copy_(local_of(spread_like(tensor, whole)))


def whole_states(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """The `state_dict` of an optimizer whose parameters are in shards, likewise whole, of whole parameters."""
    with unobserved(), torch.no_grad():
        found = optimizer.state_dict()
        parts = [p for group in optimizer.param_groups for p in group["params"]]
        for number, state in found["state"].items():
            shape = part_of_parameter(parts[number]).shape
            whole = {key: _whole(value, keep) for key, value in state.items()}
            found["state"][number] = {key: _shaped(value, shape) for key, value in whole.items()}
    return found if keep else {}


def read_whole_states(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the `state_dict` of whole parameters into an optimizer whose parameters are in shards, one state at a time."""
    groups = optimizer.param_groups
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved["param_groups"]]:
        what = "the checkpoint is of an optimizer with other parameter groups"
        raise InvalidInput(what, hint="build the optimizer with the same parameter groups")
    with unobserved(), torch.no_grad():
        for group, before in zip(groups, saved["param_groups"], strict=True):
            for part, number in zip(group["params"], before["params"], strict=True):
                state = saved["state"].get(number, {})
                optimizer.state[part].update({key: _put(part, key, value, group) for key, value in state.items()})
            group.update({key: value for key, value in before.items() if key not in ("params", *_HOW)})


def _whole(value: Any, keep: bool) -> Any:
    """The value in host memory. A part may lie there while its ranks exchange through the device."""
    if not isinstance(value, torch.Tensor):
        return value if keep else None
    if is_shard(value):
        on = spec_of(value).mesh.device_type
        if (part := local_of(value)).device.type != on:
            value = from_local(part.detach().to(on), spec_of(value))
        value = value.detach().full_tensor()  # type: ignore[attr-defined]
    return value.detach().cpu() if keep else None


def _shaped(value: Any, shape: torch.Size) -> Any:
    """A state of a flat parameter as of the parameter."""
    is_state = isinstance(value, torch.Tensor) and value.dim() and value.numel() == shape.numel()
    return value.reshape(shape) if is_state else value


def _put(part: torch.nn.Parameter, key: str, value: Any, group: Mapping[str, Any]) -> Any:
    """A state as this rank keeps it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() and value.shape == part_of_parameter(part).shape:
        room = state_room(part, value.dtype)
        local_of(room).copy_(local_of(spread_like(part, value)))
        return room
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.clone() if on_host else value.to(part.device, copy=True)


def save_states(
    folder: Path, model: Any, optimizer: Optimizer | None, *, step: int, scheduler: Any = None, weights: bool = False
) -> None:
    """Write optimizer and schedule into `folder`, which is complete afterwards or absent; every rank calls it. `weights`: and
    those of the model.
    """
    about = {"scheduler": None if scheduler is None else pack(scheduler.state_dict(), "`scheduler`")}
    new = partial(folders.whole_folder, folder, step)
    try:
        with unobserved():
            save_over_ranks(new, step, model=model, optimizer=optimizer, about=about, rng=False, weights=weights)
    except OSError as error:
        what = f"cannot save the optimizer's states in `{folder}`: {error.strerror or error}"
        raise HoldallError(what, hint="free some space or repair the folder; the checkpoint before it is intact") from error


def load_states(folder: Path, model: Any, optimizer: Optimizer | None, *, scheduler: Any = None, weights: bool = False) -> None:
    """Read them, on any number of ranks, however these shard the model; every rank calls it."""
    if folders.step_of(folder) is None:
        what = f"`{folder}` is not complete: a file of it is missing or cut off"
        raise InvalidInput(what, hint="resume from the checkpoint before it")
    about = _json.read(folder / folders.ABOUT, folders.FORMAT)
    with unobserved():
        load_over_ranks(folder, about, model=model, optimizer=optimizer, rng=False, weights=weights)
    if scheduler is not None:
        scheduler.load_state_dict(unpack(about["scheduler"], folders.ABOUT))
