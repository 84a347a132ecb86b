"""Products of layers in 4 bits (Sun et al., "Ultra-Low Precision 4-bit Training", NeurIPS 2020), emulated.

Inputs and weights are 4-bit integers; gradients are powers of four with a sign (radix-4 FP4), rounded in two phases: the
products for the input's and for the weight's gradient see levels that are apart by a factor of two. The first and the last
layer keep their precision. The grids are set by the largest value instead of the paper's SAWB and PACT, and gradients by their
largest value instead of a trained scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.narrow.formats import Integer, Radix4
from holdall.narrow.product import Formats
from holdall.precision._narrow import NarrowProducts


@dataclass(frozen=True, kw_only=True)
class Fp4(NarrowProducts):
    """`phases`: the two gradients are rounded differently, so that errors cancel."""

    phases: bool = True

    name: ClassVar[str] = "fp4"
    what: ClassVar[str] = "products in INT4 with FP4 gradients (emulated)"
    ends: ClassVar[bool] = True

    def formats(self) -> Formats:
        four = Integer(bits=4)
        return Formats(input=four, weight=four, grad_input=Radix4(), grad_weight=Radix4(phase=int(self.phases)))
