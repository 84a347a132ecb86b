"""Interleaved 1F1B: every rank has `chunks` stages, P apart, which divides the bubble by their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make, require
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved:
    name: ClassVar[str] = "interleaved"
    paper: ClassVar[str] = "Megatron-LM, SC 2021"
    is_exact: ClassVar[bool] = True

    chunks: int = 2

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        require(self.chunks >= 1, self.name, "at least one chunk a rank", "use interleaved:chunks=2")
        require(
            micro_batches % ranks == 0,
            self.name,
            f"micro-batches in rounds of {ranks}, one for each rank, not {micro_batches}",
            f"use a multiple of {ranks} micro-batches, or `1f1b`",
        )
        lists = [self._of_rank(rank, ranks, micro_batches) for rank in range(ranks)]
        return make(self.name, lists, in_rounds(ranks, ranks * self.chunks), micro_batches)

    def _of_rank(self, rank: int, ranks: int, micro_batches: int) -> list[PipeTask]:
        total = self.chunks * micro_batches
        first = min(total, (self.chunks - 1) * ranks + 2 * (ranks - 1 - rank))

        def nth(kind: str, i: int) -> PipeTask:
            chunk = i // ranks % self.chunks
            if kind == BACKWARD:
                chunk = self.chunks - 1 - chunk
            return PipeTask(rank + chunk * ranks, kind, i // (ranks * self.chunks) * ranks + i % ranks)

        tasks = [nth(FORWARD, i) for i in range(first)]
        for i in range(total):
            if first + i < total:
                tasks.append(nth(FORWARD, first + i))
            tasks.append(nth(BACKWARD, i))
        return tasks
