"""Products of layers in FP8, the rest in bf16 with float32 masters; backward keeps the FP8 copy of the input.

E4M3 for inputs and weights, E5M2 for gradients, a scale from the values at hand (Micikevicius et al. 2022, arXiv 2209.05433;
current scaling). `scaling="row"`: a scale for each row, E4M3 everywhere, and the weight's gradient from the widened input, as
torchao's `rowwise_with_gw_hp`. On GPUs that have FP8 products their kernel computes them; elsewhere the same numbers are
multiplied in float32. The input is saved in 1 byte an element where bf16 has 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.errors import unknown_name
from holdall.narrow.formats import Float8
from holdall.narrow.product import Formats
from holdall.precision._narrow import NarrowProducts

_SCALING = ("tensor", "row")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe(NarrowProducts):
    """`scaling`: what has a scale of its own, the tensor or each row. `saved`: backward keeps the FP8 input."""

    scaling: str = "tensor"
    saved: bool = True

    name: ClassVar[str] = "fp8"
    what: ClassVar[str] = "products in FP8, the rest in bf16"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    master: ClassVar[bool] = True
    norms: ClassVar[bool] = True
    convolutions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.scaling not in _SCALING:
            raise unknown_name("scaling", self.scaling, _SCALING)

    def formats(self) -> Formats:
        if self.scaling == "row":
            form = Float8(rows=True, powers=True)
            return Formats(input=form, weight=form, grad_input=form, saved=self.saved)
        wide = Float8(dtype=torch.float8_e5m2)
        return Formats(input=Float8(), weight=Float8(), grad_input=wide, grad_weight=wide, saved=self.saved)
