"""ZB-H1: 1F1B with backward in halves. A third of its bubble, P micro-batches on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make
from holdall.pipelines.schedules._zero_bubble import in_halves


@dataclass(frozen=True, slots=True, kw_only=True)
class ZbH1:
    name: ClassVar[str] = "zb_h1"
    paper: ClassVar[str] = "Zero Bubble Pipeline Parallelism, ICLR 2024"
    is_exact: ClassVar[bool] = True

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        lists = [in_halves(s, ranks - 1 - s, s, micro_batches) for s in range(ranks)]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches)
