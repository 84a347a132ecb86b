"""Linear layers whose products are computed in FP8, through torchao; parameters and all else stay as they are.

It saves time on GPUs that have FP8 products, and no memory by itself: inputs of the layers are kept in their own width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe, Undo
from holdall.precision._through_torchao import float8_training


@dataclass(frozen=True, kw_only=True)
class Fp8Products(Recipe):
    """`kind`: how scales are found. `emulate`: on devices without FP8 products."""

    kind: str = "tensorwise"
    emulate: bool = False

    name: ClassVar[str] = "fp8"
    what: ClassVar[str] = "products of linear layers in FP8 (torchao)"

    def put_on(self, model: torch.nn.Module) -> Undo:
        before = {path: module for path, module in model.named_modules() if path and isinstance(module, torch.nn.Linear)}
        float8_training(model, recipe=self.kind, emulate=self.emulate)

        def undo() -> None:
            for path, module in before.items():
                model.set_submodule(path, module)

        return undo
