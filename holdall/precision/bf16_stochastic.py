"""Parameters in bfloat16, updated in float32 and rounded stochastically, so that updates are right on average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Bf16Stochastic(Recipe):
    name: ClassVar[str] = "bf16_stochastic"
    what: ClassVar[str] = "parameters in bf16, updates rounded by chance"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    stochastic: ClassVar[bool] = True
