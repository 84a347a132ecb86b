"""XPipe: 1F1B that never flushes and computes with predicted weights instead of old ones.

A mini-batch has `per_update` micro-batches. The first of them to reach a stage predicts the weights as they will be when the
mini-batch's own update is made, from the optimizer's momentum; the others use the same prediction. Not exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import PREDICTED, Pipeline, in_rounds, make, require
from holdall.pipelines.schedules._alternating import alternating


@dataclass(frozen=True, slots=True, kw_only=True)
class XPipe:
    name: ClassVar[str] = "xpipe"
    paper: ClassVar[str] = "XPipe, arXiv 1911.04610"
    is_exact: ClassVar[bool] = False

    per_update: int = 1

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        per = self.per_update
        require(per >= 1 and micro_batches % per == 0, self.name, f"micro-batches in mini-batches of {per}", "use a multiple")
        lists = [alternating(s, ranks - s, micro_batches, per_update=per) for s in range(ranks)]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches, weights=PREDICTED, per_update=per)


def updates_ahead(stage: int, ranks: int, per_update: int) -> int:
    """Updates of a stage between the forward of a mini-batch's first micro-batch and the mini-batch's own update."""
    return -(-(ranks - 1 - stage) // per_update)
