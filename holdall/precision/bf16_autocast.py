"""Forward under autocast to bfloat16; parameters, gradients and sensitive ops stay float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Bf16Autocast(Recipe):
    name: ClassVar[str] = "bf16_autocast"
    also: ClassVar[tuple[str, ...]] = ("autocast",)
    what: ClassVar[str] = "forward under autocast to bf16"
    compute: ClassVar[torch.dtype | None] = torch.bfloat16
