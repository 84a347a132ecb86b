"""DTR: evict storages by a score when an op's results do not fit; recompute them when read.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv 2006.09616. Decisions are made during the step: the plan
is the policy, and its effect on the traced step is simulated. Scores: `dtr` (cost of the whole evicted neighbourhood over bytes
and staleness), `dtr_eq` (the neighbourhood by union-find), `local`, `lru`, `size`, `msps`, `random`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.actions.evict import Evict
from holdall.planning.online import plan_online, scores_among
from holdall.types import Plan, Problem

SCORES = ("dtr", "dtr_eq", "local", "lru", "size", "msps", "random")


@dataclass(frozen=True, kw_only=True)
class Dtr:
    score: str = "dtr_eq"
    sample: bool = False  # score a sample of about sqrt(n) of n candidates, without the smallest
    patience: float = 10.0  # give up at so many seconds of recomputation per useful second
    always: bool = False  # evict even where plain training fits

    name: ClassVar[str] = "dtr"
    paper: ClassVar[str] = "Kirisame et al., ICLR 2021, arXiv 2006.09616"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        scores_among(SCORES, self.score)

        def make(base: Evict, arena: int) -> Evict:  # noqa: ARG001
            return replace(base, score=self.score, sample=self.sample, patience=self.patience)

        return plan_online(self, problem, make, always=self.always)
