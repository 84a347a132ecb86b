"""Precision recipes: the dtypes of weights, computation and updates, and their bytes. Each file is a recipe.

    holdall.fit(model, optimizer, batch, precision="bf16")  # a part of the plan; the loop stays as it is

    with holdall.precision.prepare("O1", model, optimizer) as amp:  # without a plan
        with amp.autocast():
            loss = model(**batch).loss
        amp.backward(loss)
        amp.step(clip=1.0)

Recipes change the numbers of a run, so they are chosen by the user alone. `fit`, `trace` and the command line take those that
leave the loop as it is; under a plan masters and states are wherever the plan puts them. `bf16` is `bf16-master` there, and in
`prepare`, as ever, `bf16-weights`.
"""

from __future__ import annotations

from holdall.precision._bytes import ParameterBytes, autocast_copy_bytes, bytes_per_parameter
from holdall.precision._names import find, known_names, names, plannable
from holdall.precision._recipe import Recipe, put_on
from holdall.precision._rounding import round_stochastically
from holdall.precision._session import Session, prepare
from holdall.precision._through_torchao import finish_qat, float8_training, prepare_qat

__all__ = [
    "ParameterBytes",
    "Recipe",
    "Session",
    "autocast_copy_bytes",
    "bytes_per_parameter",
    "find",
    "finish_qat",
    "float8_training",
    "known_names",
    "names",
    "plannable",
    "prepare",
    "prepare_qat",
    "put_on",
    "round_stochastically",
]
