"""GPipe: all forwards, then all backwards. Every rank holds all micro-batches.

    rank 0   F0 F1 F2 F3 .. .. .. B0 ..
    rank 1   .. F0 F1 F2 F3 .. B0 .. B1

`reverse`: backwards from the last micro-batch to the first, as the paper draws them; torch's own order is the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe:
    name: ClassVar[str] = "gpipe"
    paper: ClassVar[str] = "GPipe, NeurIPS 2019"
    is_exact: ClassVar[bool] = True

    reverse: bool = False

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        back = range(micro_batches)[:: -1 if self.reverse else 1]
        lists = [
            [PipeTask(s, FORWARD, m) for m in range(micro_batches)] + [PipeTask(s, BACKWARD, m) for m in back]
            for s in range(ranks)
        ]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches)
