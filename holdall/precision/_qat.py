"""What recipes for quantisation-aware training share: torchao's fake-quantised linear layers, put on and taken off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe, Undo
from holdall.precision._through_torchao import prepare_qat


@dataclass(frozen=True, kw_only=True)
class FakeQuantised(Recipe):
    """Linear layers compute with weights rounded as they will be after training; gradients pass straight through."""

    scheme: ClassVar[str]

    def put_on(self, model: torch.nn.Module) -> Undo:
        before = {path: module for path, module in model.named_modules() if path and isinstance(module, torch.nn.Linear)}
        prepare_qat(model, scheme=self.scheme)

        def undo() -> None:
            for path, module in before.items():
                model.set_submodule(path, module)

        return undo
