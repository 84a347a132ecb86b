"""Forward under autocast to float16, with loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Fp16Autocast(Recipe):
    name: ClassVar[str] = "fp16_autocast"
    also: ClassVar[tuple[str, ...]] = ("O1",)
    what: ClassVar[str] = "forward under autocast to fp16, the loss scaled"
    compute: ClassVar[torch.dtype | None] = torch.float16
    scale: ClassVar[float | None] = 2.0**16
