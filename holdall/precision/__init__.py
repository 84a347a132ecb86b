"""Precision recipes: what width weights, computation and updates have, and what that costs in bytes.

    with holdall.precision.prepare("O1", model, optimizer) as amp:
        with amp.autocast():
            loss = model(**batch).loss
        amp.backward(loss)
        amp.step(clip=1.0)

Recipes change the numbers of a run, so they are chosen by the user alone. `holdall.trace(..., precision="bf16")` is
`bf16-master` as a part of a plan, with masters and states wherever the plan puts them.
"""

from __future__ import annotations

from holdall.precision.recipes import RECIPES, ParameterBytes, Recipe, autocast_copy_bytes, bytes_per_parameter, recipe_for
from holdall.precision.rounding import round_stochastically
from holdall.precision.session import Session, prepare
from holdall.precision.through_torchao import finish_qat, float8_training, prepare_qat

__all__ = [
    "RECIPES",
    "ParameterBytes",
    "Recipe",
    "Session",
    "autocast_copy_bytes",
    "bytes_per_parameter",
    "finish_qat",
    "float8_training",
    "prepare",
    "prepare_qat",
    "recipe_for",
    "round_stochastically",
]
