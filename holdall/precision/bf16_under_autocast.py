"""Working copies in bfloat16 as in `bf16_master`, and the forward under autocast, for models that mix dtypes.

A float32 buffer or a function that computes in float32 meets a bfloat16 weight in such models, which products refuse. Autocast
casts the operands of a product, and keeps ops in float32 that need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Bf16UnderAutocast(Recipe):
    name: ClassVar[str] = "bf16_under_autocast"
    what: ClassVar[str] = "as bf16-master, with the forward under autocast: for models that mix dtypes"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    compute: ClassVar[torch.dtype | None] = torch.bfloat16
    master: ClassVar[bool] = True
    norms: ClassVar[bool] = True
