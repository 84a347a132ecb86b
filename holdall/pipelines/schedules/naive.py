"""One micro-batch after the other: model parallelism without a pipeline, which keeps one rank in P busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class NaivePipe:
    name: ClassVar[str] = "naive"
    paper: ClassVar[str] = "DistBelief, NIPS 2012 (layers over machines)"
    is_exact: ClassVar[bool] = True

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        lists = [
            [PipeTask(rank, kind, batch) for batch in range(micro_batches) for kind in (FORWARD, BACKWARD)]
            for rank in range(ranks)
        ]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches)
