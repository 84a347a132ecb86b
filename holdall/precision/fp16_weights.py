"""Float16 alone, without loss scaling: a bound on speed, and not for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Fp16Weights(Recipe):
    name: ClassVar[str] = "fp16_weights"
    also: ClassVar[tuple[str, ...]] = ("O3",)
    what: ClassVar[str] = "fp16 alone, as a bound on speed"
    unscaled: ClassVar[bool] = True
    weights: ClassVar[torch.dtype] = torch.float16
