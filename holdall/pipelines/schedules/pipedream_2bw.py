"""PipeDream-2BW: gradients of `per_update` micro-batches are added before an update, so that two versions of weights suffice.

Every update has the same delay: w(t+1) = w(t) - lr * grad(w(t - 1)). Not exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import DOUBLE, Pipeline, in_rounds, make, require
from holdall.pipelines.schedules._alternating import alternating


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDream2BW:
    name: ClassVar[str] = "pipedream_2bw"
    paper: ClassVar[str] = "PipeDream-2BW, ICML 2021"
    is_exact: ClassVar[bool] = False

    per_update: int = 0  # 0: as many micro-batches as ranks

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        per = self.per_update or ranks
        require(per >= ranks, self.name, f"{ranks} micro-batches or more in an update, not {per}", f"use per_update={ranks}")
        require(micro_batches % per == 0, self.name, f"micro-batches in updates of {per}", f"use a multiple of {per}")
        lists = [alternating(s, ranks - s, micro_batches, per_update=per) for s in range(ranks)]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches, weights=DOUBLE, per_update=per)
