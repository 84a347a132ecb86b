"""MegTaiChi: DTR that knows addresses. Evicts storages next to free memory first, and often recomputed ones later.

"MegTaiChi: dynamic tensor-based memory management optimization for DNN training", ICS 2022, doi 10.1145/3524059.3532394. The
eviction of that system (dynamic tensor evicting); its tensor splitting across ranks is not implemented. The score also counts
the storage's own cost. The arena decides what is evicted. With `real`, on a CPU, storages lie at its addresses; otherwise the
device's own allocator chooses others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.actions.evict import Evict
from holdall.planning.online import least_for, plan_online
from holdall.types import Plan, Problem
from holdall.units import MiB


@dataclass(frozen=True, kw_only=True)
class Megtaichi:
    least: int | None = None  # storages with fewer bytes are never evicted; None: 1 MiB, or a thousandth of the arena
    sample: bool = False
    patience: float = 10.0
    always: bool = False
    real: bool = False  # storages lie at the arena's addresses; on a CPU

    name: ClassVar[str] = "megtaichi"
    paper: ClassVar[str] = "MegTaiChi, ICS 2022, doi 10.1145/3524059.3532394"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        def make(base: Evict, arena: int) -> Evict:
            least = least_for(self.least, arena, MiB)
            made = replace(base, score="megtaichi", how="holes", arena=arena, least=least, sample=self.sample)
            return replace(made, patience=self.patience, placed=self.real)

        return plan_online(self, problem, make, always=self.always)
