"""The parts of a run to and from files, by name: weights, optimizer state, random numbers."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdall.checkpoints.plain import pack, unpack
from holdall.checkpoints.tensors import TensorEntry, describe, read_header, read_into, save_file
from holdall.errors import InvalidInput, Unsupported
from holdall.sharded import local_of

OPTIMIZER, RANDOM = "optimizer.safetensors", "random.safetensors"
_HOW = ("fused", "foreach", "capturable", "differentiable")  # how an update is computed, not its result

SaveFile = Callable[[Mapping[str, torch.Tensor], Path], object]
Optimizer = torch.optim.Optimizer


def unobserved() -> AbstractContextManager[object]:
    """A context that hides saving from the meter of steps: its memory is freed before the next one."""
    context: AbstractContextManager[object] = _disable_current_modes()
    return context


# weights


def unwrapped(model: Any) -> Any:
    """The model inside wrappers, which add prefixes to names."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in getattr(model, "_modules", ()):  # of torch.compile
            model = model._orig_mod
        else:
            return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Name -> tensor for everything that is saved of a model; for one with adapters, only those."""
    state: dict[str, Any] = unwrapped(model).state_dict()  # under a plan, this first moves everything to its own place
    if hasattr(unwrapped(model), "peft_config") and hasattr(unwrapped(model), "get_base_model"):
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(unwrapped(model), state_dict=state)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            hint = "let `get_extra_state` return a tensor, or save that part yourself"
            raise Unsupported(f"`{name}` of the model is a {type(value).__name__}, which a plain file cannot hold", hint=hint)
    return state


def write_weights(folder: Path, model: Any) -> None:
    """Write weights with `save_pretrained` if the model has it, otherwise as `model.safetensors`; tied ones once."""
    inner = unwrapped(model)
    if not hasattr(inner, "save_pretrained"):
        save_file(_once(weights_of(model)), folder / "model.safetensors", {"format": "pt"})
        return
    with _able_to_generate(inner), _shards_streamed(inner):
        inner.save_pretrained(folder, **own_names(inner))
    try:
        check_weights(folder, model)
    except InvalidInput as error:
        what = f"`save_pretrained` of {type(inner).__name__} does not write the model's state: {error.fact}"
        raise Unsupported(what, hint="save its `state_dict` yourself, and report this") from error


def own_names(model: Any) -> dict[str, bool]:
    """What `save_pretrained` is told, so that weights get the model's own names; `from_pretrained` accepts others too."""
    options = inspect.signature(model.save_pretrained).parameters
    return {"save_original_format": False} if "save_original_format" in options else {}


def check_weights(folder: Path, model: Any) -> list[tuple[TensorEntry, torch.Tensor]]:
    """(file entry, tensor of the model) for every weight; raises at the first difference."""
    entries: dict[str, TensorEntry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in (OPTIMIZER, RANDOM):
            entries |= read_header(path)
    state = weights_of(model)
    same: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        same.setdefault(_place(name, tensor), []).append(name)
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_save", None) or ()
    pairs = []
    for name, tensor in state.items():
        there = next((n for n in same[_place(name, tensor)] if n in entries), None)
        mine = describe(tensor.dtype, tuple(tensor.shape))
        if there is None:
            if name in ignored:
                continue
            raise _other_model(folder, f"it has no `{name}`, which is {mine} in the model")
        entry = entries[there]
        if entry.dtype != tensor.dtype or entry.shape != tuple(tensor.shape):
            raise _other_model(folder, f"`{name}` is {entry} in it, and {mine} in the model")
        if there == name:
            pairs.append((entry, tensor))
    for name, entry in entries.items():
        if name not in state:
            raise _other_model(folder, f"it has `{name}`, {entry}, which the model has not")
    return pairs


def read_weights(pairs: list[tuple[TensorEntry, torch.Tensor]]) -> None:
    for entry, tensor in pairs:
        read_into(entry, tensor)
        getattr(tensor, "holdall_write_back", lambda: None)()  # of a weight that is stored packed


def _place(name: str, tensor: torch.Tensor) -> Any:
    """The same value for all names of one tensor."""
    if not (here := local_of(tensor)).numel():
        return name
    return tensor.device, here.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        first.setdefault(_place(name, tensor), name)
    return {name: state[name] for name in first.values()}


def _other_model(folder: Path, difference: str) -> InvalidInput:
    return InvalidInput(f"`{folder}` is a checkpoint of another model: {difference}", hint="build the same model as was saved")


@contextmanager
def _shards_streamed(model: Any) -> Iterator[None]:
    """Avoid that the library copies a whole shard from the device to the host before writing it."""
    module: Any = sys.modules.get(getattr(type(model).save_pretrained, "__module__", ""))
    theirs = getattr(module, "safe_save_file", None)
    if theirs is None:
        yield
        return
    module.safe_save_file = save_file
    try:
        yield
    finally:
        module.safe_save_file = theirs


@contextmanager
def _able_to_generate(model: Any) -> Iterator[None]:
    """Save with `use_cache` on: training turns it off, and a model saved so would generate without a cache."""
    configs: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None)]
    asleep = [c for c in configs if getattr(c, "use_cache", None) is False]
    for config in asleep:
        config.use_cache = True
    try:
        yield
    finally:
        for config in asleep:
            config.use_cache = False


# the optimizer


def write_optimizer(folder: Path, model: Any, optimizer: Optimizer, save: SaveFile) -> dict[str, Any]:
    """Write its tensors to the file as `<parameter>.<key>`; returns the rest as plain data."""
    optimizer.state_dict()  # finishes running updates
    names = _names(model)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k != "params"}
        packed = pack(settings, f"group {number} of the optimizer", tuples=False)
        groups.append({**packed, "params": [_name(names, p) for p in group["params"]]})
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = _name(names, parameter)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = value.detach()
            else:
                rest.setdefault(name, {})[key] = pack(value, f"`{key}` of `{name}` in the optimizer")
    save(tensors, folder / OPTIMIZER)
    return {"type": type(optimizer).__name__, "groups": groups, "state": rest, "entries": sorted(tensors)}


def check_optimizer(
    folder: Path, about: Mapping[str, Any] | None, model: Any, optimizer: Optimizer
) -> list[tuple[torch.nn.Parameter, str, TensorEntry]]:
    """(parameter, key, file entry) of every tensor of the state; raises if one does not belong to this optimizer."""
    if about is None:
        raise InvalidInput(f"`{folder}` holds no optimizer", hint="it was saved without one: leave out `optimizer=`")
    if about["type"] != type(optimizer).__name__:
        raise _damaged(folder, f"it is the state of {about['type']}, not of {type(optimizer).__name__}")
    optimizer.state_dict()  # finishes running updates
    names = _names(model)
    check_groups(folder, about["groups"], optimizer, names)
    entries = read_header(folder / OPTIMIZER)
    lost = next((entry for entry in about.get("entries", ()) if entry not in entries), None)
    if lost is not None:
        raise _damaged(folder, f"the entry `{lost}` of the optimizer is missing")
    named = {name: parameter for parameter, name in names.items()}
    found = []
    for entry, where in entries.items():
        name, _, key = entry.rpartition(".")
        found.append((_parameter(named, name, folder), key, where))
    for name in about["state"]:
        _parameter(named, name, folder)
    known = {id(p) for p, _, _ in found} | {id(named[name]) for name in about["state"]}
    for parameter, state in optimizer.state.items():
        if state and id(parameter) not in known:
            why = f"the optimizer has a state for `{_name(names, parameter)}` already, and the checkpoint has none"
            raise InvalidInput(f"cannot continue from `{folder}`: {why}", hint="load into a new optimizer")
    return found


def read_optimizer(
    about: Mapping[str, Any],
    found: list[tuple[torch.nn.Parameter, str, TensorEntry]],
    model: Any,
    optimizer: Optimizer,
    *,
    settings: bool = True,
) -> None:
    """Restore the state, one tensor at a time. `settings`: also those of the groups, except how updates are computed."""
    named = {name: parameter for parameter, name in _names(model).items()}
    for name, values in about["state"].items():
        optimizer.state[named[name]].update(unpack(values, name))
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter, key, entry in found:
        state = optimizer.state[parameter]
        before = state.get(key)
        if not _is_like(before, entry):  # otherwise in place: a plan decides where states live
            group = group_of[parameter]
            counts_on_host = key == "step" and not entry.shape and not (group.get("fused") or group.get("capturable"))
            before = torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if counts_on_host else parameter.device)
        read_into(entry, before)
        state[key] = before
    if settings:
        read_groups(optimizer, about["groups"])


def read_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restore the settings of the groups, except how updates are computed."""
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for key, value in saved.items():
            if key != "params" and key not in _HOW:
                group[key] = _as_before(unpack(value, key), group.get(key))


def check_groups(
    folder: Path, saved: list[dict[str, Any]], optimizer: Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> None:
    before = {name: n for n, group in enumerate(saved) for name in group["params"]}
    now = {_name(names, p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name in (*now, *before):
        if before.get(name) != now.get(name):
            there, here = (f"in group {n}" if n is not None else "not" for n in (before.get(name), now.get(name)))
            raise InvalidInput(
                f"`{folder}` is of another optimizer: `{name}` was {there} in it and is {here} in this one",
                hint="build the optimizer with the same parameter groups",
            )


def _names(model: Any) -> dict[torch.nn.Parameter, str]:
    return {parameter: name for name, parameter in unwrapped(model).named_parameters()}


def _name(names: Mapping[torch.nn.Parameter, str], parameter: Any) -> str:
    if parameter not in names:
        hint = "build it over this model's parameters"
        raise InvalidInput("the optimizer holds parameters that are not the model's", hint=hint)
    return names[parameter]


def _parameter(named: Mapping[str, torch.nn.Parameter], name: str, folder: Path) -> torch.nn.Parameter:
    if name not in named:
        raise _damaged(folder, f"the model has no parameter `{name}`")
    return named[name]


def _is_like(tensor: Any, entry: TensorEntry) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype == entry.dtype and tuple(tensor.shape) == entry.shape


def _as_before(value: Any, before: Any) -> Any:
    """Restore tuples, which JSON lacks, and update a tensor rate in place, since others may hold it."""
    if isinstance(before, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(before, torch.Tensor):
        return before.copy_(value if isinstance(value, torch.Tensor) else torch.tensor(value))
    return value.item() if isinstance(value, torch.Tensor) else value


def _damaged(folder: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"cannot continue from `{folder}`: {reason}", hint="remove that checkpoint to continue from the previous one"
    )


# random numbers


def write_random(folder: Path, save: SaveFile, *, only_torch: bool = False) -> dict[str, Any]:
    """States of the global generators: torch's are written to the file, Python's and numpy's returned as plain data."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    save(states, folder / RANDOM)
    if only_torch:
        return {}
    found = {"python": pack(random.getstate(), "Python's generator")}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        state["state"]["key"] = state["state"]["key"].tolist()
        found["numpy"] = pack(state, "numpy's generator")
    return found


def read_random(folder: Path, about: Mapping[str, Any]) -> None:
    """Restore the generators; skips devices that are not present."""
    for name, entry in read_header(folder / RANDOM).items():
        state = torch.empty(entry.shape, dtype=entry.dtype)
        read_into(entry, state)
        if name == "cpu":
            torch.set_rng_state(state)
        elif int(name.partition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, name)
    if "python" in about:
        random.setstate(unpack(about["python"], "random"))
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in about and numpy is not None:
        state = unpack(about["numpy"], "random")
        state["state"]["key"] = numpy.array(state["state"]["key"], dtype=numpy.uint32)
        numpy.random.set_state(state)
