"""ZB-H2: no bubble between a rank's first task and its last, for 2P - 1 micro-batches on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make, require
from holdall.pipelines.schedules._zero_bubble import in_halves


@dataclass(frozen=True, slots=True, kw_only=True)
class ZbH2:
    name: ClassVar[str] = "zb_h2"
    paper: ClassVar[str] = "Zero Bubble Pipeline Parallelism, ICLR 2024"
    is_exact: ClassVar[bool] = True

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        least = 2 * ranks - 1
        require(micro_batches >= least, self.name, f"{least} micro-batches or more, not {micro_batches}", "use `zb_h1`")
        lists = [in_halves(s, 2 * (ranks - 1 - s), 2 * s, micro_batches) for s in range(ranks)]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches)
