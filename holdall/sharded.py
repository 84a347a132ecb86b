"""Tensors and modules that torch keeps in shards, one per rank: DTensors, and modules under `fully_shard`.

Every private name of torch.distributed that the package uses outside of `parallel` is here. Nothing here imports
torch.distributed: where nobody has, nothing is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdall.errors import Unsupported

_TENSORS, _MODULES, _REPLICAS = "torch.distributed.tensor", "torch.distributed.fsdp", "torch.nn.parallel"
_ENGINE = ("pre_forward", "post_forward", "pre_backward", "post_backward", "finalize_backward")  # where it does its work
BEFORE = (
    "trace and plan the model before it is sharded, then shard it and call `holdall.apply`; "
    'or let holdall shard it: fit(..., mesh={"dp": 2})'
)


def is_shard(tensor: object) -> bool:
    """Is it a DTensor, of which this rank has a part?"""
    kind = _class(_TENSORS, "DTensor")
    return kind is not None and isinstance(tensor, kind)


def has_shards(types: Iterable[type]) -> bool:
    """Is DTensor among the types of an op's arguments? Such an op is left to DTensor, which calls others on local tensors."""
    kind = _class(_TENSORS, "DTensor")
    return kind is not None and any(issubclass(t, kind) for t in types)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, which has the bytes; any other tensor itself."""
    return tensor._local_tensor if is_shard(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def spec_of(tensor: torch.Tensor) -> Any:
    """How a DTensor is spread over ranks."""
    return tensor._spec  # type: ignore[attr-defined]


def from_local(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """The DTensor of a part; the reverse of `local_of` and `spec_of`."""
    return _class(_TENSORS, "DTensor")(local, spec, requires_grad=False)  # type: ignore[misc, no-any-return]


def part_of_parameter(part: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter that an optimizer updates in parts, one on each rank; any other parameter itself."""
    return getattr(part, "holdall_whole", part)  # type: ignore[no-any-return]


def state_room(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for a state of the optimizer: where the parameter is, or where a plan keeps its states."""
    make: Callable[[torch.dtype], torch.Tensor] | None = getattr(parameter, "holdall_state_room", None)
    return torch.zeros_like(parameter.detach(), dtype=dtype) if make is None else make(dtype)


def set_state_room(parameter: torch.Tensor, make: Callable[[torch.dtype], torch.Tensor]) -> None:
    """Let `make` give that room."""
    parameter.holdall_state_room = make  # type: ignore[attr-defined]


def forget_state_room(parameter: torch.Tensor) -> None:
    parameter.__dict__.pop("holdall_state_room", None)


def gather(module: torch.nn.Module) -> None:
    """Have a module under `fully_shard` gather its parameters, if it has not; its own hooks reshard them after backward."""
    kind = _class(_MODULES, "FSDPModule")
    if kind is not None and isinstance(module, kind):
        module.unshard()


def sharded_parameter(model: torch.nn.Module) -> str:
    """The name of the first parameter that is in shards; empty: there is none."""
    return next((name for name, p in model.named_parameters() if is_shard(p)), "")


def give_back(model: Any) -> None:
    """Between two steps: have modules under `fully_shard` give back parameters that an evaluation has left gathered."""
    kind = _class(_MODULES, "FSDPModule")
    parts = model.modules.values() if in_stages(model) else (model,)
    for module in (m for part in parts for m in part.modules()) if kind is not None else ():
        if isinstance(module, kind):  # type: ignore[arg-type]
            module.reshard()


def is_in_shards(model: Any) -> bool:
    """Is it in shards, between two steps?"""
    give_back(model)
    return bool(sharded_parameter(model))


def in_stages(model: Any) -> bool:
    """Is it a rank's part of a pipeline (`holdall.pipelines.start`), whose other stages are on other ranks?"""
    return bool(getattr(model, "holdall_stages", False))


def refuse_sharded(model: torch.nn.Module) -> None:
    """Refuse to trace a model that is sharded: its parameters cannot be replaced by fake ones."""
    flat = _class(_MODULES, "FullyShardedDataParallel")
    for path, module in model.named_modules():
        if flat is not None and isinstance(module, flat):
            raise Unsupported(
                f"{f'`{path}`' if path else 'the model'} is under FullyShardedDataParallel, whose flat parameters plans do not "
                "support",
                hint=f"use `torch.distributed.fsdp.fully_shard`, and {BEFORE}",
            )
    name = sharded_parameter(model)
    if name:
        raise Unsupported(f"the model is sharded over ranks (`{name}` is a DTensor), so its step cannot be traced", hint=BEFORE)


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of the buckets that DistributedDataParallel keeps beside the gradients, which are as large; 0: there are none."""
    kind = _class(_REPLICAS, "DistributedDataParallel")
    if kind is None or not isinstance(model, kind) or model.gradient_as_bucket_view:
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def watch_resizes(see: Callable[[torch.UntypedStorage], object]) -> Callable[[], None]:
    """Call `see` with every storage whose size is changed, as `fully_shard` does; returns the function that ends it."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        out = plain(storage, size)
        see(storage)
        return out

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]

    def end() -> None:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    return end


def is_engines(hook: Any) -> bool:
    """Is it a hook by which `fully_shard`, or what of ours sums gradients, learns that backward has reached a module?"""
    kind, owner = _class("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"), getattr(hook, "__self__", None)
    return getattr(owner, "is_engine", False) or (kind is not None and isinstance(owner, kind))


def watch_engine(inside: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    """Have `fully_shard` gather, free and reduce inside `inside`; returns the function that ends it."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:  # another version of torch: blocks then seem to have other ops than they have alone
        return lambda: None

    plain = {name: getattr(FSDPParamGroup, name) for name in _ENGINE if hasattr(FSDPParamGroup, name)}

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with inside():
                return run(*args, **kwargs)

        return call

    for name, run in plain.items():
        setattr(FSDPParamGroup, name, watched(run))

    def end() -> None:
        for name, run in plain.items():
            setattr(FSDPParamGroup, name, run)

    return end


def unrecorded_propagation(quiet: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    """Have DTensor find the shapes of its results inside `quiet`: it runs ops on whole fake tensors for that, which take no
    memory; returns the function that ends it."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    plain = getattr(ShardingPropagator, name, None)
    if plain is None:  # another version of torch
        return lambda: None

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with quiet():
            return plain(*args, **kwargs)

    setattr(ShardingPropagator, name, propagate)
    return lambda: setattr(ShardingPropagator, name, plain)


def _class(module: str, name: str) -> type[Any] | None:
    """A class of a module that is loaded; None: it is not, so there are no objects of it."""
    loaded = sys.modules.get(module)
    return getattr(loaded, name, None)
