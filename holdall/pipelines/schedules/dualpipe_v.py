"""DualPipeV: DualPipe folded in the middle: one copy of the model, two stages a rank, down the ranks and up again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_snake, make, require
from holdall.pipelines.schedules._dual import crossing


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPipeV:
    name: ClassVar[str] = "dualpipe_v"
    paper: ClassVar[str] = "DualPipeV (cut-in-half), sail-sg, 2025"
    is_exact: ClassVar[bool] = True

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        least = 2 * ranks
        require(micro_batches >= least, self.name, f"{least} micro-batches or more, not {micro_batches}", "use `zb_v`")
        batches = range(micro_batches)
        lists = [crossing(r, ranks, (batches, batches), (r, 2 * ranks - 1 - r)) for r in range(ranks)]
        return make(self.name, lists, in_snake(ranks, 2 * ranks), micro_batches)
