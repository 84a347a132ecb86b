"""Float32 throughout: plain training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.precision._recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Fp32(Recipe):
    name: ClassVar[str] = "fp32"
    also: ClassVar[tuple[str, ...]] = ("float32", "O0")
    what: ClassVar[str] = "float32 throughout"
    exact: ClassVar[bool] = True
