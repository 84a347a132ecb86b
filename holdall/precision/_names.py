"""Recipes by name."""

from __future__ import annotations

import torch

from holdall.errors import InvalidInput, Unsupported, unknown_name
from holdall.precision._recipe import Recipe
from holdall.registry import build_member, member_class, member_names, read_choice

_BEFORE = {"bf16": "bf16-weights"}  # names with another meaning in `prepare`; in a plan "bf16" is `bf16-master`


def names() -> tuple[str, ...]:
    """Names of all recipes, with hyphens."""
    return tuple(name.replace("_", "-") for name in member_names("precision"))


def known_names() -> dict[str, str]:
    """Every accepted name -> the recipe's own name."""
    found = {name: name for name in names()}
    for name in names():
        found |= dict.fromkeys(member_class("precision", name.replace("-", "_")).also, name)
    return found


def find(recipe: str | Recipe, *, alone: bool = True) -> Recipe:
    """The recipe of that name or apex level, with options as in `fp8:kind=rowwise`. `alone`: for a loop without a plan.

    float16 without loss scaling is refused unless it is asked for as O3.
    """
    made = _build(recipe, alone) if isinstance(recipe, str) else recipe
    if torch.float16 in (made.weights, made.compute) and made.scale is None and not made.unscaled:
        raise _unscaled(str(made))
    return made


def _build(text: str, alone: bool) -> Recipe:
    typed, options = read_choice(text)
    if typed in ("fp16", "float16", "half"):
        raise _unscaled(typed)
    known = known_names()
    name = (_BEFORE.get(typed) if alone else None) or known.get(typed.replace("_", "-"), known.get(typed))
    if name is None:
        raise unknown_name("precision", typed, known)
    made: Recipe = build_member("precision", name.replace("-", "_"), options, f"option of {name}")
    return made


def _unscaled(name: str) -> InvalidInput:
    return InvalidInput(
        f"`{name}` computes in float16 without loss scaling, so small gradients become zero",
        hint='use "fp16-autocast" or "fp16-master", which scale the loss, or "bf16-autocast", which need not; '
        '"O3" is float16 alone, as a bound on speed',
    )


def plannable(recipe: str | Recipe) -> Recipe:
    """The recipe; raises if it cannot be used in a plan."""
    found = find(recipe, alone=False)
    if found.obstacle:
        instead = [name for name in names() if not find(name, alone=False).obstacle]
        raise Unsupported(
            f"`{recipe}` {found.obstacle}",
            hint=f'use one of {", ".join(instead)}; or `holdall.precision.prepare("{found}", ...)` in a loop without a plan',
        )
    return found
