"""Bytes per parameter of a recipe."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from holdall.precision._names import find
from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Bytes per parameter between backward and step. `each`: further bytes per tensor (a step counter)."""

    weights: float
    gradients: float
    master: float
    states: float
    each: int = 0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.states


def bytes_per_parameter(recipe: str | Recipe, optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer) -> ParameterBytes:
    """Bytes that a recipe keeps per parameter with this optimizer; states are measured by a step on tiny tensors.

    Of a recipe that packs frozen weights: the bytes of such a weight. An autocast recipe also makes copies of weights during
    forward: see `autocast_copy_bytes`.
    """
    chosen = find(recipe)
    if chosen.frozen_bytes is not None:
        return ParameterBytes(weights=chosen.frozen_bytes, gradients=0, master=0, states=0)
    width = chosen.weights.itemsize
    stepped = torch.float32 if chosen.is_wide_update else chosen.weights
    small, large = (_state_bytes(optimizer, n, stepped) for n in (64, 128))
    states = (large - small) / 64
    return ParameterBytes(
        weights=width, gradients=width, master=4 if chosen.master else 0, states=states, each=round(small - 64 * states)
    )


def _state_bytes(optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer, numel: int, dtype: torch.dtype) -> int:
    """Bytes of the states of a parameter with this number of elements."""
    p = torch.zeros(numel, dtype=dtype, requires_grad=True)
    p.grad = torch.ones_like(p)
    arguments = _arguments(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else {}
    build: Any = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    made = build([p], **arguments)
    made.step()
    return sum(v.untyped_storage().nbytes() for v in made.state[p].values() if isinstance(v, torch.Tensor))


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's defaults, as far as its constructor takes them."""
    taken = inspect.signature(type(optimizer).__init__).parameters
    return {k: v for k, v in optimizer.defaults.items() if k in taken}


_CAST = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)


def autocast_copy_bytes(model: torch.nn.Module, recipe: str | Recipe) -> int:
    """Bytes of the 16-bit weight copies that autocast makes in forward and the graph keeps until backward.

    Counts the parameters of linear and convolution layers, each once; not those of other modules that call such ops.
    """
    chosen = find(recipe)
    if chosen.compute is None:
        return 0
    found = {
        id(p): p
        for module in model.modules()
        if isinstance(module, _CAST)
        for p in module.parameters(recurse=False)
        if p.dtype != chosen.compute and p.is_floating_point()
    }
    return sum(p.numel() * chosen.compute.itemsize for p in found.values())
