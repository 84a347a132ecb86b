"""Evict: device memory as a cache; when results of an op do not fit, storages go by a score and come back when asked for.

Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616) and, by `how` and `score`, MegTaiChi (ICS 2022)
and Coop (NeurIPS 2023). The policy decides as the step runs, so it serves models whose course depends on their values. Its
clock counts the costs of ops, not seconds: `rewrite` plays the policy over the schedule, `install` hands the same policy to
the runtime, and both take the same decisions as long as the loop does what was traced.

Addresses are a model (see `runtime/eviction/arena.py`): real allocators place storages as they like; bytes are counted truly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.evict.schedule import Rehearsal, rehearse
from holdall.errors import InvalidInput, OverBudget, Unsupported, unknown_name
from holdall.runtime.eviction.pool import Driver, EvictionPool
from holdall.runtime.eviction.room import EvictionRoom, Holes, Windows
from holdall.runtime.eviction.scores import score_named
from holdall.runtime.eviction.storages import Rates
from holdall.types import Facts, Problem, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.eviction.evictor import Evictor
    from holdall.runtime.harness import Harness

WAYS = ("bytes", "holes", "windows")


@dataclass(frozen=True, kw_only=True)
class Evict(Facts):
    budget: int  # bytes of the device, parameters and all
    score: str = "dtr_eq"
    how: str = "bytes"  # what makes room: enough "bytes", one of the "holes" of an arena, a run of neighbours ("windows")
    arena: int = 0  # bytes of the arena: the budget less what is there before a step
    least: int = 0  # storages smaller than this are never evicted
    sample: bool = False  # score about sqrt(n) of n candidates
    patience: float = 10.0  # seconds of recomputation per useful second at which to give up; 0: never
    align: int = 1  # what sizes are rounded to
    flops: float = 1e12  # by these rates the policy's clock counts
    bandwidth: float = 1e11
    overhead: float = 5e-6

    name: ClassVar[str] = "evict"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 90  # after all others, whose steps it then sees
    block: ClassVar[str] = "the step"  # one policy for all of it
    spares_activations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        score_named(self.score)
        if self.how not in WAYS:
            raise unknown_name("way to make room", self.how, WAYS)
        if self.budget <= 0:
            raise InvalidInput(f"`evict` got a budget of {self.budget} bytes", hint="give the bytes of the whole device")

    @staticmethod
    def samples(trace: Trace) -> list[Evict]:
        """One storage at a time and a run at a time, as tight as can be among a few budgets below plain training's."""
        schedule = Schedule(trace=trace, home="cpu")
        whole = Evict(budget=2**62, patience=2.0)
        free = whole.rehearse(schedule)
        found = []
        for score, how in (("dtr_eq", "bytes"), ("coop", "windows")):
            for share in (75, 90, 100):
                budget = free.before + (free.peak - free.before) * share // 100
                sample = replace(whole, score=score, how=how, budget=budget, arena=budget - free.before)
                if fits(sample, schedule):
                    found.append(sample)
                    break
        return found

    @property
    def rates(self) -> Rates:
        return Rates(flops=self.flops, bandwidth=self.bandwidth, overhead=self.overhead)

    def pool(
        self, driver: Driver, *, outside: int = 0, live: Callable[[], int] | None = None, strict: bool = True
    ) -> EvictionPool:
        """A new cache under this policy; `outside`: bytes that are there before a step."""
        return EvictionPool(
            budget=self.budget,
            room=self._room(min(self.arena, max(0, self.budget - outside))),
            driver=driver,
            live=live,
            outside=outside,
            patience=self.patience or math.inf,
            strict=strict,
        )

    def _room(self, arena: int) -> EvictionRoom:
        score = score_named(self.score)
        if self.how == "bytes":
            return EvictionRoom(score, sample=self.sample, least=self.least)
        kind = Holes if self.how == "holes" else Windows
        tiny = self.least - 1 if self.how == "windows" and self.least else 0
        return kind(score, arena, sample=self.sample, least=self.least, align=self.align, tiny=tiny)

    def rehearse(self, schedule: Schedule) -> Rehearsal:
        """The schedule under this policy, and what it took. Goes over the budget where nothing more can go."""
        return rehearse(schedule, self.rates, lambda driver, outside: self.pool(driver, outside=outside, strict=False))

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:  # noqa: ARG002
        return self.rehearse(schedule).schedule

    def install(self, harness: Harness) -> None:
        from holdall.runtime.eviction.installing import install  # planning needs no torch

        others = sorted({a.name for a in harness.plan.actions} - {"evict", "keep"})
        if others:
            raise Unsupported(
                f"`evict` decides about the whole step and cannot run beside {', '.join(others)}",
                hint="use it alone",
            )

        def make_pool(evictor: Evictor, before: int, live: Callable[[], int]) -> EvictionPool:
            return self.pool(evictor, outside=before, live=live)

        install(harness, make_pool, self.rates, align=self.align)


def fits(action: Evict, schedule: Schedule) -> bool:
    """Whether the policy keeps to its budget on this schedule, without thrashing."""
    try:
        return action.rehearse(schedule).counts.over == 0
    except OverBudget:
        return False
