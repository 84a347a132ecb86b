"""The recipes, and how many bytes each takes per parameter.

Mixed precision after Micikevicius et al. (ICLR 2018, arXiv 1710.03740); O0 to O3 are the levels of NVIDIA's apex.amp.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from holdall.errors import InvalidInput, unknown_name

INITIAL_SCALE = 2.0**16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    weights: torch.dtype = torch.float32  # of parameters and gradients
    compute: torch.dtype | None = None  # autocast to this width; None: that of the weights
    master: bool = False  # a float32 copy of the weights is what is updated
    scale: float | None = None  # the loss is multiplied by this at first, then as overflows allow; None: it is not
    stochastic: bool = False  # updates are rounded up or down by chance, and so arrive on average
    norms: bool = False  # batch norms keep float32

    @property
    def is_wide_update(self) -> bool:
        """The update is made in float32 though the weights are narrower."""
        return self.master or self.stochastic


_BF16, _FP16 = torch.bfloat16, torch.float16
_ALL = (
    Recipe(name="fp32"),
    Recipe(name="bf16-autocast", compute=_BF16),
    Recipe(name="fp16-autocast", compute=_FP16, scale=INITIAL_SCALE),
    Recipe(name="bf16-master", weights=_BF16, master=True, norms=True),
    Recipe(name="fp16-master", weights=_FP16, master=True, scale=INITIAL_SCALE, norms=True),
    Recipe(name="bf16", weights=_BF16),
    Recipe(name="bf16-stochastic", weights=_BF16, stochastic=True),
    Recipe(name="O3", weights=_FP16),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}
_LEVELS = {"O0": "fp32", "O1": "fp16-autocast", "O2": "fp16-master"}


def recipe_for(name: str | Recipe) -> Recipe:
    """The recipe of that name or apex level. float16 without loss scaling is refused unless it is asked for as O3."""
    if isinstance(name, Recipe):
        recipe = name
    elif name in ("fp16", "float16", "half"):
        recipe = Recipe(name=name, weights=_FP16)
    else:
        known = {**RECIPES, **{level: RECIPES[other] for level, other in _LEVELS.items()}}
        if name not in known:
            raise unknown_name("precision recipe", name, known)
        recipe = known[name]
    if _FP16 in (recipe.weights, recipe.compute) and recipe.scale is None and recipe.name != "O3":
        raise InvalidInput(
            f"`{recipe.name}` computes in float16 without loss scaling, so small gradients become zero",
            hint='use "fp16-autocast" or "fp16-master", which scale the loss, or "bf16-autocast", which need not; '
            '"O3" is float16 alone, as a bound on speed',
        )
    return recipe


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Bytes per parameter between backward and step. `each`: bytes per tensor beside them (a counter of steps)."""

    weights: float
    gradients: float
    master: float
    states: float
    each: int = 0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.states


def bytes_per_parameter(recipe: str | Recipe, optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer) -> ParameterBytes:
    """What the recipe keeps per parameter under this optimizer. States are found by a step of the optimizer on tiny tensors.

    An autocast recipe also makes copies of weights while forward runs: see `autocast_copy_bytes`.
    """
    chosen = recipe_for(recipe)
    width = chosen.weights.itemsize
    stepped = torch.float32 if chosen.is_wide_update else chosen.weights
    small, large = (_state_bytes(optimizer, n, stepped) for n in (64, 128))
    states = (large - small) / 64
    return ParameterBytes(
        weights=width, gradients=width, master=4 if chosen.master else 0, states=states, each=round(small - 64 * states)
    )


def _state_bytes(optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer, numel: int, dtype: torch.dtype) -> int:
    """Bytes of the states of a parameter with so many elements."""
    p = torch.zeros(numel, dtype=dtype, requires_grad=True)
    p.grad = torch.ones_like(p)
    arguments = _arguments(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else {}
    build: Any = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    made = build([p], **arguments)
    made.step()
    return sum(v.untyped_storage().nbytes() for v in made.state[p].values() if isinstance(v, torch.Tensor))


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's defaults that its class takes."""
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
    """Bytes of the narrow weight copies that autocast makes in a forward and the graph keeps until backward.

    Counted are the parameters of linear and convolution layers, each once; modules that call such ops on parameters of their
    own are not seen.
    """
    chosen = recipe_for(recipe)
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
