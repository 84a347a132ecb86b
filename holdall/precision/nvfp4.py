"""Products of layers in NVFP4: blocks of 16 E2M1 numbers with an E4M3 scale under one of the tensor, emulated.

Gradients are rounded by chance, without which training in 4 bits drifts (NVIDIA, "Pretraining Large Language Models with
NVFP4", 2025, arXiv 2509.25149; its Hadamard transforms and its last layers in bf16 are left out, but for the head). The rest
is bf16 with float32 masters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.narrow.formats import BlockFloats
from holdall.narrow.product import Formats
from holdall.precision._narrow import NarrowProducts


@dataclass(frozen=True, kw_only=True)
class Nvfp4(NarrowProducts):
    name: ClassVar[str] = "nvfp4"
    what: ClassVar[str] = "products in NVFP4 (emulated), the rest in bf16"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    master: ClassVar[bool] = True
    norms: ClassVar[bool] = True
    convolutions: ClassVar[bool] = False

    def formats(self) -> Formats:
        form = BlockFloats(element="e2m1", block=16, unit="e4m3")
        by_chance = BlockFloats(element="e2m1", block=16, unit="e4m3", stochastic=True)
        return Formats(input=form, weight=form, grad_input=by_chance, grad_weight=by_chance)
