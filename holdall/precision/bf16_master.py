"""Computation in bfloat16 with working copies; the float32 parameters are the masters that are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Bf16Master(Recipe):
    name: ClassVar[str] = "bf16_master"
    also: ClassVar[tuple[str, ...]] = ("bf16", "bfloat16", "bf16-mixed")
    what: ClassVar[str] = "computed with bf16 copies of float32 parameters"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    master: ClassVar[bool] = True
    norms: ClassVar[bool] = True
