"""Breadth-first: each chunk does all micro-batches before the next, so that a chunk's gradients are complete at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make, require
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class BreadthFirst:
    name: ClassVar[str] = "breadth_first"
    paper: ClassVar[str] = "Breadth-First Pipeline Parallelism, MLSys 2023"
    is_exact: ClassVar[bool] = True

    chunks: int = 2

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        require(self.chunks >= 1, self.name, "at least one chunk a rank", "use breadth_first:chunks=2")
        lists = []
        for rank in range(ranks):
            own = range(rank, ranks * self.chunks, ranks)
            ahead = [PipeTask(s, FORWARD, m) for s in own for m in range(micro_batches)]
            back = [PipeTask(s, BACKWARD, m) for s in reversed(own) for m in reversed(range(micro_batches))]
            lists.append(ahead + back)
        return make(self.name, lists, in_rounds(ranks, ranks * self.chunks), micro_batches)
