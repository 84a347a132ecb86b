"""Checkpoints of models that are in shards over ranks: each rank writes its part, by torch.distributed.checkpoint (DCP).

    OUT/checkpoints/step-000300/
      sharded/          DCP's files: `model.<name>`, `optimizer.<parameter>.<key>`, `random.<rank>.cpu`
      training.json     as in other checkpoints
      complete.json     written last, by rank 0; without it there is no checkpoint

They load over any number of ranks, however these shard the model, and in one process; all ranks must see the folder. Without
holdall:

    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder + "/sharded")
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from holdall.checkpoints import folders
from holdall.checkpoints.plain import pack, unpack
from holdall.checkpoints.states import check_groups, read_groups, unwrapped, weights_of
from holdall.errors import InvalidInput
from holdall.sharded import give_back, in_stages, is_shard, part_of_parameter, state_room
from holdall.types import _json

SHARDED = "sharded"
log = logging.getLogger("holdall")
Optimizer = torch.optim.Optimizer


def save_over_ranks(
    new: Callable[[], AbstractContextManager[Path]],
    step: int,
    *,
    model: Any,
    optimizer: Optimizer | None,
    about: Mapping[str, Any],
    rng: bool,
    weights: bool = True,
) -> None:
    """Write a checkpoint; every rank calls it. `new`: the folder to write into, on rank 0. `weights=False`: leave them out."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save

    from holdall.parallel.agree import together
    from holdall.parallel.groups import ranks_here
    from holdall.parallel.parts import joined

    first = ranks_here() == 1 or dist.get_rank() == 0
    tensors = {f"model.{name}": t for name, t in weights_of(model).items()} if weights else {}
    said: dict[str, Any] | None = None
    if optimizer is not None:
        more, said = _optimizer(model, optimizer)
        tensors |= more
        said = _of_all_stages(said) if in_stages(model) else said
    if rng:
        tensors |= {f"random.{_rank()}.{name}": state for name, state in _generators().items()}
    rest = {"optimizer": said, "random": {"ranks": ranks_here()} if rng else None}
    with ExitStack() as stack:

        def begin() -> str:
            return str(stack.enter_context(new())) if first else ""

        folder = Path(_from_first(together(begin)))
        whole = {entry: joined(t) for entry, t in tensors.items()}
        together(lambda: save(whole, checkpoint_id=str(folder / SHARDED)))
        if first:
            _json.write(folder / folders.ABOUT, {"format": folders.FORMAT, "step": step, **about, **rest})
        together(stack.pop_all().close)


def load_over_ranks(
    folder: Path, about: Mapping[str, Any], *, model: Any, optimizer: Optimizer | None, rng: bool, weights: bool = True
) -> None:
    """Read a checkpoint into the model, sharded or not; every rank calls it. Everything is compared before anything is read."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    from holdall.parallel.parts import joined, side_by_side, take_parts

    at = str(folder / SHARDED)
    there: Mapping[str, Any] = FileSystemReader(at).read_metadata().state_dict_metadata
    wanted: dict[str, torch.Tensor] = {}
    if model is not None and weights:
        for name, t in weights_of(model).items():
            wanted[f"model.{name}"] = _checked(folder, f"model.{name}", t, there)
    otherwise: list[tuple[torch.nn.Parameter, str, str]] = []
    if optimizer is not None:
        said = about["optimizer"]
        if said is None or said["type"] != type(optimizer).__name__:
            whose = "no optimizer" if said is None else f"the state of {said['type']}, not of {type(optimizer).__name__}"
            raise InvalidInput(f"`{folder}` holds {whose}", hint="build the optimizer as it was, or leave it out")
        names = _names(model, optimizer)
        said = _of_own_stages(said, set(names.values())) if in_stages(model) else said
        check_groups(folder, said["groups"], optimizer, names)
        for parameter, key, entry in _entries(optimizer, names, said["entries"]):
            size, dtype = tuple(there[entry].size), there[entry].properties.dtype
            if size and size != tuple(parameter.shape):
                otherwise.append((parameter, key, entry))
                continue
            wanted[entry] = _state_like(optimizer, parameter, key, size, dtype)
            optimizer.state[parameter][key] = wanted[entry]
        for name, values in said["state"].items():
            for parameter in (p for p, own in names.items() if own == name):
                optimizer.state[parameter].update(unpack(values, name))
    is_same = rng and about["random"]["ranks"] == _ranks()
    if rng and not is_same:
        log.warning("holdall: random numbers were saved on %d ranks and are not restored on others", about["random"]["ranks"])
    numbers = {f"random.{_rank()}.{name}": state for name, state in _generators().items()} if is_same else {}
    wanted |= {entry: state for entry, state in numbers.items() if entry in there}
    divided = {entry: t for entry, t in wanted.items() if side_by_side(t) is not None}
    wanted |= {entry: joined(t) for entry, t in divided.items()}
    load(wanted, checkpoint_id=at)
    for entry, t in divided.items():
        take_parts(t, wanted[entry])
    for parameter, key, entry in otherwise:  # parts of flat parameters where they were whole, or the reverse: one at a time
        assert optimizer is not None
        whole = {entry: torch.empty(there[entry].size, dtype=there[entry].properties.dtype)}
        load(whole, checkpoint_id=at)
        optimizer.state[parameter][key] = spread_like(parameter, whole[entry])
    if optimizer is not None:
        read_groups(optimizer, about["optimizer"]["groups"])
    for entry in numbers:
        if entry in there:
            name = entry.split(".", 2)[2]
            torch.set_rng_state(wanted[entry]) if name == "cpu" else torch.cuda.set_rng_state(wanted[entry])


def _optimizer(model: Any, optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of its state by name, and the rest as plain data."""
    names = _names(model, optimizer)
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{names[parameter]}.{key}"] = value.detach()
            else:
                rest.setdefault(names[parameter], {})[key] = pack(value, f"`{key}` of `{names[parameter]}` in the optimizer")
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k != "params"}
        packed = pack(settings, f"group {number} of the optimizer", tuples=False)
        groups.append({**packed, "params": [names[p] for p in group["params"]]})
    return tensors, {"type": type(optimizer).__name__, "groups": groups, "state": rest, "entries": sorted(tensors)}


def _of_all_stages(said: dict[str, Any]) -> dict[str, Any]:
    """What ranks with other stages of a pipeline say of their optimizers, as of one."""
    import torch.distributed as dist

    each: list[dict[str, Any]] = [said] * _ranks()
    if len(each) > 1:
        dist.all_gather_object(each, said)
    groups = []
    for same in zip(*(one["groups"] for one in each), strict=True):
        params = list(dict.fromkeys(name for group in same for name in group["params"]))
        groups.append({**same[0], "params": params})
    state = {name: values for one in each for name, values in one["state"].items()}
    return {**said, "groups": groups, "state": state, "entries": sorted({e for one in each for e in one["entries"]})}


def _of_own_stages(said: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """What was said of the parameters that this rank has."""
    groups = [{**group, "params": [name for name in group["params"] if name in names]} for group in said["groups"]]
    state = {name: values for name, values in said["state"].items() if name in names}
    entries = [e for e in said["entries"] if e.removeprefix("optimizer.").rpartition(".")[0] in names]
    return {**said, "groups": groups, "state": state, "entries": entries}


def _names(model: Any, optimizer: Optimizer) -> dict[Any, str]:
    """The names of what the optimizer updates: parameters, or parts of them."""
    give_back(model)
    own = {id(p): name for name, p in unwrapped(model).named_parameters()}
    found = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        name = own.get(id(part_of_parameter(p)))
        if name is None:
            hint = "build it over this model's parameters"
            raise InvalidInput("the optimizer holds parameters that are not the model's", hint=hint)
        found[p] = name
    return found


def _entries(
    optimizer: Optimizer, names: Mapping[torch.nn.Parameter, str], saved: list[str]
) -> Iterator[tuple[torch.nn.Parameter, str, str]]:
    """(parameter, key, entry), in one order on all ranks."""
    by_name = {name: parameter for parameter, name in names.items()}
    assert len(by_name) == sum(len(group["params"]) for group in optimizer.param_groups)
    for entry in saved:
        name, _, key = entry.removeprefix("optimizer.").rpartition(".")
        yield by_name[name], key, entry


def _checked(folder: Path, name: str, tensor: torch.Tensor, there: Mapping[str, Any]) -> torch.Tensor:
    found = there.get(name)
    if found is None or tuple(found.size) != tuple(tensor.shape) or found.properties.dtype != tensor.dtype:
        what = "it has none" if found is None else f"{found.properties.dtype} {list(found.size)} in it"
        raise InvalidInput(
            f"`{folder}` is a checkpoint of another model: `{name.removeprefix('model.')}` is {tensor.dtype} "
            f"{list(tensor.shape)} in the model, {what}",
            hint="build the same model as was saved",
        )
    return tensor


def _state_like(
    optimizer: Optimizer, parameter: torch.nn.Parameter, key: str, size: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    before = optimizer.state[parameter].get(key)
    if isinstance(before, torch.Tensor) and tuple(before.shape) == size and before.dtype == dtype:
        return before
    if size:
        return state_room(parameter, dtype)
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.zeros((), dtype=dtype, device="cpu" if on_host else parameter.device)


def spread_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor as the parameter is: its shape, and this rank's part of it."""
    shaped = whole.reshape(parameter.shape).to(parameter.device)
    if not is_shard(parameter):
        return shaped
    from torch.distributed.tensor import distribute_tensor

    spec: Any = parameter
    return distribute_tensor(shaped, spec.device_mesh, spec.placements, src_data_rank=None)


def _generators() -> dict[str, torch.Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _ranks() -> int:
    from holdall.parallel.groups import ranks_here

    return ranks_here()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if _ranks() > 1 else 0


def _from_first(value: str) -> str:
    from holdall.parallel.agree import from_first

    return from_first(lambda: value)
