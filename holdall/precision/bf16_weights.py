"""Parameters, gradients and updates in bfloat16; small updates are lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Bf16Weights(Recipe):
    name: ClassVar[str] = "bf16_weights"
    what: ClassVar[str] = "parameters and updates in bf16, no float32 copy"
    weights: ClassVar[torch.dtype] = torch.bfloat16
