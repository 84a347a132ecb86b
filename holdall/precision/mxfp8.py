"""Products of layers in MXFP8: blocks of 32 E4M3 numbers with a power of two (OCP Microscaling Formats v1.0), emulated.

Blocks lie along the dimension that a product sums over, so inputs and weights are rounded once for every product that they are
in. The rest is bf16 with float32 masters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.narrow.formats import BlockFloats
from holdall.narrow.product import Formats
from holdall.precision._narrow import NarrowProducts


@dataclass(frozen=True, kw_only=True)
class Mxfp8(NarrowProducts):
    name: ClassVar[str] = "mxfp8"
    what: ClassVar[str] = "products in MXFP8 (emulated), the rest in bf16"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    master: ClassVar[bool] = True
    norms: ClassVar[bool] = True
    convolutions: ClassVar[bool] = False

    def formats(self) -> Formats:
        form = BlockFloats()
        return Formats(input=form, weight=form, grad_input=form, grad_weight=form)
