"""MegTaiChi: DTR that knows addresses. Storages beside free memory go first, those that were computed again often go later.

"MegTaiChi: dynamic tensor-based memory management optimization for DNN training", ICS 2022, doi 10.1145/3524059.3532394. The
eviction of that system (dynamic tensor evicting); its tensor splitting across ranks is not part of this. The score also counts
the storage's own cost. Addresses are modelled: the arena decides what goes, and the device's own allocator places tensors as it
likes.
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
    least: int | None = None  # bytes below which a storage is left alone; None: 1 MiB, or a thousandth of the arena
    sample: bool = False
    patience: float = 10.0
    always: bool = False

    name: ClassVar[str] = "megtaichi"
    paper: ClassVar[str] = "MegTaiChi, ICS 2022, doi 10.1145/3524059.3532394"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        def make(base: Evict, arena: int) -> Evict:
            least = least_for(self.least, arena, MiB)
            return replace(
                base, score="megtaichi", how="holes", arena=arena, least=least, sample=self.sample, patience=self.patience
            )

        return plan_online(self, problem, make, always=self.always)
