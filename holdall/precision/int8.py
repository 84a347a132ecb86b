"""Products of layers in INT8 (Banner et al., "Scalable Methods for 8-bit Training", NeurIPS 2018, arXiv 1805.11046).

Inputs and weights in 8 bits; the gradient that goes on to the input is rounded to 8 bits by chance, the one for the weight is
a copy in 16 bits (the paper's bifurcation). Batch norms divide by their range instead of the standard deviation (Range BN). The
grid of an input is set by the mean of the largest values of parts of the batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.narrow.formats import Integer
from holdall.narrow.product import Formats
from holdall.narrow.range_norm import put_on_norms
from holdall.precision._narrow import NarrowProducts
from holdall.precision._recipe import Undo


@dataclass(frozen=True, kw_only=True)
class Int8(NarrowProducts):
    """Each product can be switched off: `output`, `grad_input`. `chunks`: parts of the batch for the grid of an input.

    `range_norm`: batch norms by range.
    """

    output: bool = True
    grad_input: bool = True
    chunks: int = 8
    range_norm: bool = True

    name: ClassVar[str] = "int8"
    what: ClassVar[str] = "products in INT8, gradients rounded by chance"

    def formats(self) -> Formats:
        return Formats(
            input=Integer(chunks=self.chunks) if self.output else None,
            weight=Integer() if self.output or self.grad_input else None,
            grad_input=Integer(stochastic=True) if self.grad_input else None,
        )

    def put_on(self, model: torch.nn.Module) -> Undo:
        undo = ExitStack()
        undo.callback(super().put_on(model))
        if self.range_norm:
            undo.callback(put_on_norms(model))
        return undo.close
