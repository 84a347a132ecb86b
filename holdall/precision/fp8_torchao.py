"""Linear layers with matmuls in FP8, by torchao; parameters and everything else keep their dtype.

It saves time on GPUs with FP8 matmuls, and no memory by itself: inputs of the layers are saved in their own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe, Undo
from holdall.precision._through_torchao import float8_training


@dataclass(frozen=True, kw_only=True)
class Fp8ByTorchao(Recipe):
    """`kind`: the granularity of scales. `emulate`: for devices without FP8 matmuls."""

    kind: str = "tensorwise"
    emulate: bool = False

    name: ClassVar[str] = "fp8_torchao"
    what: ClassVar[str] = "products of linear layers in FP8 (torchao)"

    def put_on(self, model: torch.nn.Module) -> Undo:
        before = {path: module for path, module in model.named_modules() if path and isinstance(module, torch.nn.Linear)}
        float8_training(model, recipe=self.kind, emulate=self.emulate)

        def undo() -> None:
            for path, module in before.items():
                model.set_submodule(path, module)

        return undo
