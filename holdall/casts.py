"""Inputs in the dtype of the weights, for modules that compute with working copies of their parameters (`precision="bf16"`).

A model whose weights are bf16 while its inputs are float32 (images, audio, timesteps) fails at the first layer that gets both.
Here the layers of `torch.nn` cast the float32 tensors that they are called with to the dtype of their weights, as FSDP2's mixed
precision does for the modules that it wraps (`cast_forward_inputs`). Modules of the model's own that hold weights do so only
where they could not run otherwise (`needed`). All else stays in float32: timesteps until their first layer, routing weights,
targets, buffers. Batch norms compute with float32 copies of their weights, as their running statistics are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only


def may_cast(model: torch.nn.Module, needed: Iterable[str] = ()) -> list[str]:
    """Paths of the modules that may cast their inputs: torch's layers, and modules of the classes in `needed`."""
    also = set(needed)
    return [
        path
        for path, module in model.named_modules()
        if type(module).__name__ in also or any(c.__module__.startswith("torch.nn.modules") for c in _own(type(module)))
    ]


def _own(kind: type) -> list[type]:
    """A module's class and its bases, without those that every module has."""
    return [c for c in kind.__mro__ if c not in (torch.nn.Module, object)]


def cast_inputs(
    model: torch.nn.Module, dtype: torch.dtype, paths: Iterable[str], *, seen: Callable[[str], object] = lambda _: None
) -> Callable[[], None]:
    """Make these modules cast their inputs to `dtype`; returns a function that undoes it.

    `seen` is called with the path of a module whenever it casts.
    """
    wanted = set(paths)
    undo: list[Callable[[], None]] = []
    for path, module in model.named_modules():
        if path in wanted and _weights(module):
            undo.append(_put(module, partial(_forward, module, module.forward, dtype, partial(seen, path))))

    def end() -> None:
        for each in reversed(undo):
            each()

    return end


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of the module itself, without those of its children."""
    own: list[torch.Tensor] = [p for p in module._parameters.values() if p is not None]
    made_of = module._modules.get("parametrizations")
    return own + (list(made_of.parameters()) if made_of is not None else [])


def _put(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward

    def undo() -> None:
        if before is not None:
            module.__dict__["forward"] = before
        else:
            del module.__dict__["forward"]

    return undo


def _forward(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    dtype: torch.dtype,
    seen: Callable[[], object],
    *args: Any,
    **kwargs: Any,
) -> Any:
    weights = _weights(module)
    if not any(p.dtype == dtype for p in weights) or torch.is_autocast_enabled(weights[0].device.type):
        return forward(*args, **kwargs)  # the parameters themselves; or autocast casts for each op
    made: dict[int, torch.Tensor] = {}  # queries, keys and values are often one tensor, which is cast once

    def cast(t: torch.Tensor) -> torch.Tensor:
        if t.dtype != torch.float32:
            return t
        if id(t) not in made:
            made[id(t)] = t.to(dtype)
        return made[id(t)]

    args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
    is_norm = isinstance(module, _NormBase) and module.running_mean is not None and module.running_mean.dtype != dtype
    if made or is_norm:
        seen()
    return _wide_norm(module, forward, args, kwargs) if is_norm else forward(*args, **kwargs)


def _wide_norm(module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A norm with running statistics in float32: its kernels want weights of the same dtype."""
    own = dict(module._parameters)
    for name, p in own.items():
        if p is not None:
            module._parameters[name] = p.float()  # type: ignore[assignment]
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(own)
