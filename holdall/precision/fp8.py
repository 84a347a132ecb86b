"""Products of layers in FP8, the rest in bf16 with float32 masters; backward keeps the FP8 copy of the input.

E4M3 for inputs and weights, E5M2 for gradients, a scale from the values at hand (Micikevicius et al. 2022, arXiv 2209.05433;
current scaling). `scaling="row"`: a scale for each row, E4M3 everywhere, and the weight's gradient from the widened input, as
torchao's `rowwise_with_gw_hp`. `scaling="delayed"`: a scale from the largest value of the last `history` steps, as Transformer
Engine has it; the window is a part of the model's state (`holdall/narrow/delayed.py`). On GPUs that have FP8 products their
kernel computes them; elsewhere the same numbers are multiplied in float32. The input is saved in 1 byte an element where bf16
has 2.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.errors import InvalidInput, unknown_name
from holdall.narrow.counting import put_on_counts
from holdall.narrow.delayed import put_on_delayed
from holdall.narrow.formats import Float8
from holdall.narrow.layers import skipped_layers
from holdall.narrow.product import Formats
from holdall.precision._narrow import NarrowProducts
from holdall.precision._recipe import Undo

_SCALING = ("tensor", "row", "delayed")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe(NarrowProducts):
    """`scaling`: what has a scale of its own, the tensor or each row, or the tensor by the steps before ("delayed").

    `saved`: backward keeps the FP8 input. `history`: the steps that a delayed scale looks back.
    `count`: report what each layer loses to the format, which takes time and memory.
    """

    scaling: str = "tensor"
    saved: bool = True
    history: int = 16
    count: bool = False

    name: ClassVar[str] = "fp8"
    what: ClassVar[str] = "products in FP8, the rest in bf16"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    master: ClassVar[bool] = True
    norms: ClassVar[bool] = True
    convolutions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.scaling not in _SCALING:
            raise unknown_name("scaling", self.scaling, _SCALING)
        if self.scaling == "delayed" and not self.saved:
            raise InvalidInput("`saved=false` has no meaning with delayed scaling", hint="leave one of them out")
        if self.history < 1:
            raise InvalidInput(f"`history` is {self.history}", hint="give the number of steps to look back, such as 16")

    @property
    def obstacle_over_ranks(self) -> str:
        if self.scaling == "delayed":
            return "each rank would have a window of scales of its own"
        return "counts are of one process" if self.count else ""

    def put_on(self, model: torch.nn.Module) -> Undo:
        undo = ExitStack()
        if self.scaling == "delayed":
            skip = skipped_layers(model, self.skip.split("+"), ends=self.ends, head=True)
            undo.callback(put_on_delayed(model, skip=skip, history=self.history))
        else:
            undo.callback(super().put_on(model))
        if self.count:
            undo.callback(put_on_counts(model))
        return undo.close

    def formats(self) -> Formats:
        if self.scaling == "delayed":
            raise InvalidInput(
                "delayed scales are for all layers of a model", hint="use fp8 or fp8:scaling=row for single ones"
            )
        if self.scaling == "row":
            form = Float8(rows=True, powers=True)
            return Formats(input=form, weight=form, grad_input=form, saved=self.saved)
        wide = Float8(dtype=torch.float8_e5m2)
        return Formats(input=Float8(), weight=Float8(), grad_input=wide, grad_weight=wide, saved=self.saved)
