"""DAPPLE's early backward: stage i begins with K forwards and then alternates.

    policy a   K = P - i            as 1F1B
    policy b   K = 2(P - i) - 1     twice the activations, which hides messages that take as long as computing

`most`: micro-batches that fit on a rank; K is never more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_rounds, make, require
from holdall.pipelines.schedules._alternating import alternating


@dataclass(frozen=True, slots=True, kw_only=True)
class Dapple:
    name: ClassVar[str] = "dapple"
    paper: ClassVar[str] = "DAPPLE, PPoPP 2021"
    is_exact: ClassVar[bool] = True

    policy: str = "b"
    most: int = 0  # 0: as many as the policy wants

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        require(self.policy in ("a", "b"), self.name, f"the policy a or b, not {self.policy!r}", "use dapple:policy=b")
        wanted = [ranks - s if self.policy == "a" else 2 * (ranks - s) - 1 for s in range(ranks)]
        lists = [alternating(s, min(k, self.most or k), micro_batches) for s, k in enumerate(wanted)]
        return make(self.name, lists, in_rounds(ranks, ranks), micro_batches)
