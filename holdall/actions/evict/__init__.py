"""Evict: device memory as a cache; when an op's results do not fit, storages are evicted by a score and recomputed when read.

Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616) and, by `how` and `score`, MegTaiChi (ICS 2022)
and Coop (NeurIPS 2023). With the rates of a link (`write`, `read`) evicted storages may also be copied to a farther tier, as in
DELTA (TACO 2024). The policy decides while the step runs, so it suits models whose control flow depends on values. Its
clock counts the costs of ops, not seconds: `rewrite` simulates the policy on the schedule, `install` gives the same policy to
the runtime, and both take the same decisions as long as the loop does what was traced.

Addresses are modelled (see `runtime/eviction/arena.py`), and byte counts are real. With `placed`, storages lie at the arena's
addresses, in memory that is allocated once; without, real allocators choose others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.evict.schedule import Rehearsal, rehearse
from holdall.errors import InvalidInput, OverBudget, Unsupported, unknown_name
from holdall.runtime.eviction.driver import Driver
from holdall.runtime.eviction.pool import EvictionPool
from holdall.runtime.eviction.room import EvictionRoom, Holes, Knapsack, Windows
from holdall.runtime.eviction.scores import score_named
from holdall.runtime.eviction.storages import Rates
from holdall.runtime.eviction.swapping import SwapLink, Swaps
from holdall.types import Facts, Problem, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.eviction.evictor import Evictor
    from holdall.runtime.harness import Harness

ADDRESSED = 64  # bytes; real addresses are multiples of it
WAYS = ("bytes", "holes", "windows", "knapsack")
DIRECTORS = ("both", "swap", "rerun")


@dataclass(frozen=True, kw_only=True)
class Evict(Facts):
    budget: int  # bytes of the device, parameters included
    score: str = "dtr_eq"
    how: str = (
        "bytes"  # how room is made: enough free "bytes" or those of a "knapsack", a hole of an arena ("holes", "windows")
    )
    arena: int = 0  # bytes of the arena: the budget less the bytes in use before a step
    least: int = 0  # storages with fewer bytes are never evicted
    sample: bool = False  # score a sample of about sqrt(n) of n candidates
    patience: float = 10.0  # give up at so many seconds of recomputation per useful second; 0: never
    align: int = 1  # sizes are rounded up to multiples of this
    placed: bool = False  # storages lie at the addresses of the arena; on a CPU
    flops: float = 1e12  # FLOP/s by which the policy's clock counts
    bandwidth: float = 1e11
    overhead: float = 5e-6
    write: float = 0.0  # bytes per second to the farther tier, by which the clock counts; 0: nothing is swapped
    read: float = 0.0
    latency: float = 0.0
    room: int = 2**62  # bytes of the farther tier
    director: str = "both"  # swap or recompute, whichever costs less; or always "swap", always "rerun"
    ahead: int = 8  # ops that a fetch may be ahead of its use
    learns: bool = True  # the first step records when storages are used; later ones know it
    tier: str = ""  # that storages are swapped to; empty: the nearest tier

    name: ClassVar[str] = "evict"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 90  # after all others, whose steps it has to see
    block: ClassVar[str] = "the step"  # one policy for the whole step
    spares_activations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        score_named(self.score)
        if self.how not in WAYS:
            raise unknown_name("way to make room", self.how, WAYS)
        if self.director not in DIRECTORS:
            raise unknown_name("director", self.director, DIRECTORS)
        if self.budget <= 0:
            raise InvalidInput(
                f"`evict` got a budget of {self.budget} bytes",
                hint="give the bytes of the whole device, such as Evict(budget=1 << 30)",
            )

    @staticmethod
    def samples(trace: Trace) -> list[Evict]:
        """Evicting single storages, and runs of them, under the tightest of a few budgets that works."""
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
        found += [replace(s, score="delta", write=1e9, read=1e9, director="swap") for s in found[:1]]
        return found

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({self.tier}) if self.write > 0 else frozenset()

    @property
    def rates(self) -> Rates:
        return Rates(flops=self.flops, bandwidth=self.bandwidth, overhead=self.overhead)

    def pool(
        self, driver: Driver, *, outside: int = 0, live: Callable[[], int] | None = None, strict: bool = True
    ) -> EvictionPool:
        """A new cache under this policy; `outside`: bytes in use before a step."""
        return EvictionPool(
            budget=self.budget,
            room=self._room(min(self.arena, max(0, self.budget - outside))),
            driver=driver,
            live=live,
            outside=outside,
            patience=self.patience or math.inf,
            strict=strict,
            swaps=self._swaps(outside),
        )

    def _swaps(self, outside: int) -> Swaps | None:
        if self.write <= 0:
            return None
        link = SwapLink(out=self.write, back=self.read, latency=self.latency, room=self.room)
        return Swaps(link, director=self.director, ahead=self.ahead, learns=self.learns, outside=outside)

    def _room(self, arena: int) -> EvictionRoom:
        score = score_named(self.score)
        if self.how == "bytes":
            return EvictionRoom(score, sample=self.sample, least=self.least)
        if self.how == "knapsack":
            return Knapsack(score, sample=self.sample, least=self.least)
        kind = Holes if self.how == "holes" else Windows
        tiny = self.least - 1 if self.how == "windows" and self.least else 0
        align = max(self.align, ADDRESSED) if self.placed else self.align
        return kind(score, arena, sample=self.sample, least=self.least, align=align, tiny=tiny)

    def rehearse(self, schedule: Schedule) -> Rehearsal:
        """The schedule under this policy, with its costs. It exceeds the budget where nothing is left to evict.

        Of a policy that learns: the second step, and those after it.
        """
        return rehearse(
            schedule, self.rates, lambda driver, outside: self.pool(driver, outside=outside, strict=False), tier=self.tier
        )

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        if self.write <= 0:
            return self.rehearse(schedule).schedule
        return replace(self, tier=problem.other(self.tier)).rehearse(schedule).schedule

    def install(self, harness: Harness) -> None:
        from holdall.runtime.eviction.installing import install  # planning needs no torch

        others = sorted({a.name for a in harness.plan.actions} - {"evict", "keep"})
        if others:
            raise Unsupported(
                f"`evict` decides about the whole step and cannot be combined with {', '.join(others)}",
                hint='plan with allow=["evict"]',
            )

        def make_pool(evictor: Evictor, before: int, live: Callable[[], int]) -> EvictionPool:
            return self.pool(evictor, outside=before, live=live)

        store = harness.stores.at(self.tier) if self.write > 0 else None
        memory = self.arena if self.placed else 0
        install(harness, make_pool, self.rates, align=self.align, memory=memory, store=store)


def fits(action: Evict, schedule: Schedule) -> bool:
    """Does the policy keep to its budget on this schedule, without thrashing?"""
    try:
        return action.rehearse(schedule).counts.over == 0
    except OverBudget:
        return False
