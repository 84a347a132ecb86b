"""DELTA: when memory is full, a filter picks storages, a director swaps or recomputes each, and a prefetcher copies early.

Tang et al., TACO 2024, arXiv 2203.15980.
DTR's run time with a second way to evict (`runtime/eviction/swapping.py`). The filter ranks by the cost of bringing a storage
back in the cheaper way, over bytes and the time until its next use; `filter="knapsack"` is the paper's later form. The first
step records the order of uses; before that, staleness stands for the time until the next use, as in DTR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from holdall.actions.evict import Evict
from holdall.cost.link import reach
from holdall.errors import Infeasible, unknown_name
from holdall.planning.online import plan_online
from holdall.simulator import simulate
from holdall.types import Plan, Problem

FILTERS = {"density": "bytes", "knapsack": "knapsack"}


@dataclass(frozen=True, kw_only=True)
class Delta:
    director: str = "both"  # "both": the cheaper of swap and recomputation; "swap" or "rerun": always that
    filter: str = "density"  # storages with the least cost per byte, one by one; "knapsack": one choice of all
    ahead: int = 8  # ops that a fetch may be ahead of its use
    learns: bool = True  # later steps know the uses that the first one recorded
    patience: float = 10.0  # give up at so many seconds of recomputation per useful second
    always: bool = False  # evict even where plain training fits

    name: ClassVar[str] = "delta"
    paper: ClassVar[str] = "Tang et al., TACO 2024, arXiv 2203.15980"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        if self.filter not in FILTERS:
            raise unknown_name("filter", self.filter, FILTERS)
        directors = [self.director, "swap", "rerun"] if self.director == "both" and problem.hardware.others else [self.director]
        plans: list[Plan] = []
        refused: Infeasible | None = None
        for director in directors:
            try:
                plans.append(plan_online(self, problem, partial(self._policy, problem, director), always=self.always))
            except Infeasible as error:
                if refused is None or (error.smallest or math.inf) < (refused.smallest or math.inf):
                    refused = error
            if plans and plans[-1].predicted.seconds <= _SLIGHTLY * simulate(problem, []).seconds:
                break  # nothing to gain
        if not plans:
            assert refused is not None
            raise refused
        best = min(plans, key=lambda plan: plan.predicted.seconds)
        return best if best is plans[0] or not best.actions else replace(best, why=(*best.why, _ALONE))

    def _policy(self, problem: Problem, director: str, base: Evict, arena: int) -> Evict:  # noqa: ARG002
        policy = replace(base, score="delta", how=FILTERS[self.filter], director=director, patience=self.patience)
        if not problem.hardware.others:
            return policy
        tier = problem.other()
        link = reach(problem.hardware, tier)
        return replace(
            policy,
            write=link.write,
            read=link.read,
            latency=link.latency,
            room=problem.limit(tier),
            ahead=self.ahead,
            learns=self.learns,
            tier=tier,
        )


_SLIGHTLY = 1.01
_ALONE = "evicting in one way only is predicted faster than choosing for each storage"
