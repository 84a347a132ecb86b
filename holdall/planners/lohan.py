"""LoHan: the first name of Ratel (arXiv 2403.06504), by which many know it. The same planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.planners.ratel import Ratel


@dataclass(frozen=True, kw_only=True)
class LoHan(Ratel):
    name: ClassVar[str] = "lohan"
