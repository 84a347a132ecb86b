"""A precision for each layer: those that the loss depends on least compute in FP8 (or another recipe's formats).

After the layer-wise mixed precision of BaGuaLu (Ma et al., PPoPP 2022): the sensitivity of a layer is how far the loss moves
when that layer alone is lowered, over a few batches; of all sets of layers whose sensitivities add up to at most the error
allowed, the one with the most bytes is lowered. A layer whose loss is not finite when it is lowered keeps its precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from holdall.errors import InvalidInput, unknown_name
from holdall.narrow.layers import layer_names, put_on_layers, skipped_layers
from holdall.narrow.product import Multiplier
from holdall.precision._names import find
from holdall.precision._narrow import NarrowProducts
from holdall.precision._recipe import Undo
from holdall.registry import member_names

_GRID = 1000  # parts of the error allowed


@dataclass(frozen=True, kw_only=True)
class Layerwise(NarrowProducts):
    """`low`: names of the layers that are lowered, separated by `+` (`choose_layers` finds them). `to`: the recipe."""

    low: str = ""
    to: str = "int8"

    name: ClassVar[str] = "layerwise"
    what: ClassVar[str] = "chosen layers in a narrower recipe"

    def put_on(self, model: torch.nn.Module) -> Undo:
        known = layer_names(model)
        wrong = [name for name in self.low.split("+") if name not in known]
        if wrong:
            what = f"`low` names `{wrong[0]}`, which is no layer of the model" if self.low else "`layerwise` lowers no layer"
            hint = (
                "name layers, as in layerwise:low="
                + "+".join(known[:2])
                + ", or let holdall.precision.layerwise.choose find them"
            )
            raise InvalidInput(what, hint=hint)
        return super().put_on(model)

    def formats_of(self, layer: str) -> Multiplier | None:
        return _formats_of(self.to) if layer in self.low.split("+") else None


def _formats_of(name: str) -> Multiplier:
    recipe = find(name)
    if not isinstance(recipe, NarrowProducts) or isinstance(recipe, Layerwise):
        known = [n for n in member_names("precision") if issubclass(type(find(n)), NarrowProducts) and n != "layerwise"]
        raise unknown_name("recipe for layers", name, known)
    return recipe.formats()


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """A layer, what lowering it saves and what it costs."""

    name: str
    nbytes: int
    sensitivity: float  # share of the loss that moves; infinite: the loss is not finite


def sensitivities(
    model: torch.nn.Module, losses: Callable[[torch.nn.Module], Iterable[torch.Tensor]], *, to: str = "int8", skip: str = ""
) -> list[LayerChoice]:
    """Measure each layer alone. `losses`: computes the losses of a few batches."""
    formats = _formats_of(to)
    skipped = skipped_layers(model, skip.split("+"), ends=False, head=True)
    plain = _losses(model, losses)
    found = []
    for name in sorted(set(layer_names(model)) - skipped):
        undo = put_on_layers(model, lambda layer, only=name: formats if layer == only else None, skip=skipped)  # type: ignore[misc]
        try:
            moved = _losses(model, losses)
        finally:
            undo()
        apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(moved, plain, strict=True))
        nbytes = model.get_submodule(name).get_parameter("weight").nbytes
        found.append(LayerChoice(name=name, nbytes=nbytes, sensitivity=apart if math.isfinite(apart) else math.inf))
    return found


def choose_layers(choices: Sequence[LayerChoice], *, error: float) -> list[str]:
    """Lower the layers with the most bytes whose sensitivities add up to at most `error` (a knapsack, on a fine grid)."""
    if error < 0:
        raise InvalidInput(f"`error` is {error}", hint="give the share of the loss that may move, such as 0.01")
    unit = error / _GRID or 1.0
    best: dict[int, tuple[int, tuple[str, ...]]] = {0: (0, ())}  # units spent -> bytes saved, and by which layers
    for choice in sorted(choices, key=lambda c: c.name):
        cost = math.ceil(min(choice.sensitivity / unit, _GRID + 1) - 1e-9)
        for spent, (saved, chosen) in sorted(best.items(), reverse=True):
            then = spent + cost
            if then <= _GRID and saved + choice.nbytes > best.get(then, (-1, ()))[0]:
                best[then] = (saved + choice.nbytes, (*chosen, choice.name))
    return list(max(best.values())[1])


def choose(model: torch.nn.Module, losses: Any, *, error: float, to: str = "int8", skip: str = "") -> Layerwise:
    """The recipe for a model: `holdall.fit(..., precision=str(choose(model, losses, error=0.01)))`."""
    low = choose_layers(sensitivities(model, losses, to=to, skip=skip), error=error)
    return replace(Layerwise(), low="+".join(low), to=to)


def _losses(model: torch.nn.Module, losses: Callable[[torch.nn.Module], Iterable[torch.Tensor]]) -> list[float]:
    with torch.no_grad(), torch.random.fork_rng():
        return [float(loss) for loss in losses(model)]
