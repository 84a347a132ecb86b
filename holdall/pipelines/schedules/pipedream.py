"""PipeDream: 1F1B that never flushes. Weights are updated after every backward; a mini-batch keeps the version of its forward.

Stage s holds P - s versions. Updates are late: w(t+1) = w(t) - lr * grad(w of t - P + 1 + s at stage s). Not exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import STASHED, Pipeline, in_rounds, make
from holdall.pipelines.schedules._alternating import alternating


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDream:
    name: ClassVar[str] = "pipedream"
    paper: ClassVar[str] = "PipeDream, SOSP 2019"
    is_exact: ClassVar[bool] = False

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        lists = [alternating(s, ranks - s, micro_batches, per_update=1) for s in range(ranks)]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches, weights=STASHED, per_update=1)
