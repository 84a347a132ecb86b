"""Coop: evict a run of adjacent storages just large enough for the request, and place cheap storages next to each other.

"Coop: Memory is not a Commodity", NeurIPS 2023. A sweep with two pointers over the arena finds the run whose recomputation
costs least; results of expensive ops are placed from the left end, cheap ones from the right; an op that changes a storage in
place leaves it where it is. The arena decides what is evicted. With `real`, on a CPU, storages lie at its addresses; otherwise
the device's own allocator chooses others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.actions.evict import Evict
from holdall.planning.online import least_for, plan_online
from holdall.types import Plan, Problem

SMALL = 10 * 1024  # bytes: storages that the paper keeps in an area of their own


@dataclass(frozen=True, kw_only=True)
class Coop:
    small: int | None = None  # bytes up to which a storage stays out of the arena; None: 10 KiB, or a thousandth of it
    patience: float = 10.0
    always: bool = False
    real: bool = False  # storages lie at the arena's addresses; on a CPU

    name: ClassVar[str] = "coop"
    paper: ClassVar[str] = "Coop, NeurIPS 2023"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        def make(base: Evict, arena: int) -> Evict:
            least = least_for(self.small, arena, SMALL)
            made = replace(base, score="coop", how="windows", arena=arena, least=least, patience=self.patience)
            return replace(made, placed=self.real)

        return plan_online(self, problem, make, always=self.always)
