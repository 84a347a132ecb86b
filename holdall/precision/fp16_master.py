"""Computation in float16 with loss scaling; float32 masters are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Fp16Master(Recipe):
    name: ClassVar[str] = "fp16_master"
    also: ClassVar[tuple[str, ...]] = ("O2",)
    what: ClassVar[str] = "computed in fp16, the loss scaled, float32 parameters updated"
    weights: ClassVar[torch.dtype] = torch.float16
    master: ClassVar[bool] = True
    scale: ClassVar[float | None] = 2.0**16
    norms: ClassVar[bool] = True
