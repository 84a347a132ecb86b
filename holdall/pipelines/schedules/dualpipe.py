"""DualPipe: two copies of the model in opposite directions, forward and backward of the two overlapped, backward in halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_snake, make, require
from holdall.pipelines.schedules._dual import crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPipe:
    name: ClassVar[str] = "dualpipe"
    paper: ClassVar[str] = "DeepSeek-V3 technical report, 2024"
    is_exact: ClassVar[bool] = True

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        require(ranks % 2 == 0, self.name, f"an even number of ranks, not {ranks}", "use `dualpipe_v`")
        require(
            micro_batches % 2 == 0 and micro_batches >= 2 * ranks,
            self.name,
            f"an even number of micro-batches, {2 * ranks} or more, not {micro_batches}",
            "use more micro-batches",
        )
        down, up = range(micro_batches // 2), range(micro_batches // 2, micro_batches)
        lists = []
        for rank in range(ranks):
            near = min(rank, ranks - 1 - rank)
            streams, stages = (down, up), (rank, 2 * ranks - 1 - rank)
            if rank >= ranks // 2:
                streams, stages = (up, down), (stages[1], stages[0])
            lists.append(crossing(near, ranks // 2, streams, stages))
        return make(self.name, lists, in_snake(ranks, 2 * ranks), micro_batches, chain=ranks)
