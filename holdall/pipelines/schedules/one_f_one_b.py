"""1F1B with a flush (PipeDream-flush; policy A of DAPPLE): stage s begins with P - s forwards, so it holds no more than that.

rank 0   F0 F1 .. .. B0 .. F2 ..
rank 1   .. F0 B0 B0 F1 B1 B1 F2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make
from holdall.pipelines.schedules._alternating import alternating


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB:
    name: ClassVar[str] = "one_f_one_b"
    paper: ClassVar[str] = "PipeDream-flush, ICML 2021; DAPPLE, PPoPP 2021"
    is_exact: ClassVar[bool] = True

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        lists = [alternating(s, ranks - s, micro_batches) for s in range(ranks)]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches)
