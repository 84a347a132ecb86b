"""FlexFlow: a random walk over plans. A change is kept if it helps, or with the probability exp(beta (old - new)).

The walk starts from data parallelism and from random plans. A change is a layer's way to divide, that of a stage or of all
layers, a bound between stages, the number of stages, or that of micro-batches. Plans that do not fit cost more the more they
exceed. Unity walks by graph substitutions instead; the space here is the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp
from typing import ClassVar

from holdall.pipelines.hybrid.plans import HybridPlan, best_judged, formula, refused
from holdall.pipelines.hybrid.strategies import Pricing, Strategy
from holdall.pipelines.searches._sizes import even_stages, micro_batch_counts, pipe_counts, sub_meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexFlow:
    name: ClassVar[str] = "flexflow"
    paper: ClassVar[str] = "FlexFlow, MLSys 2019; Unity, OSDI 2022"

    steps: int = 1500  # changes that each walk proposes
    walks: int = 6
    beta: float = 60.0  # of the relative change of a step's time
    seed: int = 0

    def __call__(self, pricing: Pricing) -> HybridPlan:
        found = best_judged(pricing, self.candidates(pricing))
        if found is None:
            raise refused(pricing)
        return found

    def candidates(self, pricing: Pricing) -> list[HybridPlan]:
        """The best plan of each walk."""
        rng = random.Random(self.seed)
        found: list[tuple[float, HybridPlan]] = []
        for walk in range(self.walks):
            made = _Walk(pricing, rng, from_data=walk == 0).best(self.steps, self.beta)
            if made is not None:
                found.append(made)
        return [plan for _, plan in sorted(found, key=lambda entry: entry[0])]


class _Walk:
    def __init__(self, pricing: Pricing, rng: random.Random, *, from_data: bool) -> None:
        self.pricing, self.rng = pricing, rng
        self.counts, self.pipes = micro_batch_counts(pricing), pipe_counts(pricing)
        self.sizes = sub_meshes(pricing.cluster.devices, pricing.cluster.per_node)
        devices = pricing.cluster.devices
        self.now = self._even((devices,), [Strategy(1, devices)], 1) if from_data else self._random()

    def _even(self, devices: tuple[int, ...], each: list[Strategy], count: int) -> HybridPlan:
        """Stages of about equal time, a way for each."""
        cut = even_stages(self.pricing, len(devices))
        ways = [s for n, s in enumerate(each) for _ in range(cut[n], cut[n + 1])]
        return HybridPlan(cut=cut, devices=devices, strategies=tuple(ways), micro_batches=count)

    def _random(self) -> HybridPlan:
        pipes = self.rng.choice(self.pipes)
        devices = (self.pricing.cluster.devices // pipes,) * pipes
        if self.rng.random() < 0.3:
            devices = self._groups() or devices
        each = {n: self.rng.choice(self.pricing.strategies(n)) for n in set(devices)}
        return self._even(devices, [each[n] for n in devices], self.rng.choice(self._counts(each.values())))

    def _groups(self) -> tuple[int, ...] | None:
        """Unequal groups of devices; None: they do not fill the cluster, or are too many."""
        left, found = self.pricing.cluster.devices, list[int]()
        while left:
            found.append(self.rng.choice([n for n in self.sizes if n <= left]))
            left -= found[-1]
        most = min(len(self.pricing.model.layers), self.pricing.space.most_pipes or len(found))
        return tuple(found) if len(found) <= most else None

    def _counts(self, strategies: Iterable[Strategy]) -> list[int]:
        """Micro-batches that the data ranks can share."""
        batch, data = self.pricing.model.batch, {s.data for s in strategies}
        return [n for n in self.counts if not any(batch // n % d for d in data)] or self.counts[:1]

    def _cost(self, plan: HybridPlan) -> tuple[float, bool]:
        """(seconds, more where the bytes exceed; whether they fit)"""
        seconds, peak = formula(self.pricing, plan)
        over = peak / self.pricing.cluster.memory
        return (seconds, True) if over <= 1 else (seconds * (1 + over), False)

    def best(self, steps: int, beta: float) -> tuple[float, HybridPlan] | None:
        cost, fits = self._cost(self.now)
        found = (cost, self.now) if fits and cost < float("inf") else None
        for _ in range(steps):
            plan = self._change()
            new, fits = self._cost(plan)
            worse = new / cost - 1 if cost < float("inf") else -1.0
            if worse <= 0 or (new < float("inf") and self.rng.random() < exp(-beta * min(worse, 10.0))):
                self.now, cost = plan, new
                if fits and (found is None or new < found[0]):
                    found = (new, plan)
        return found

    def _change(self) -> HybridPlan:
        now, rng = self.now, self.rng
        kind = rng.random()
        if kind < 0.1:
            return self._random()
        if kind < 0.2:
            return replace(now, micro_batches=rng.choice(self.counts))
        if kind < 0.35 and now.pipes > 1:
            n = rng.randrange(1, now.pipes)
            bound = now.cut[n] + rng.choice((-1, 1))
            if not now.cut[n - 1] < bound < now.cut[n + 1]:
                return now
            moved, near = (bound, bound + 1) if bound < now.cut[n] else (bound - 1, bound - 2)
            chosen = list(now.strategies)
            chosen[moved] = now.strategies[near]  # as the layer that is now its neighbour
            return replace(now, cut=(*now.cut[:n], bound, *now.cut[n + 1 :]), strategies=tuple(chosen))
        chosen = list(now.strategies)
        stage = rng.randrange(now.pipes)
        first, end = now.cut[stage], now.cut[stage + 1]
        strategy = rng.choice(self.pricing.strategies(now.devices[stage]))
        if kind < 0.5:  # all stages of as many devices
            for n, devices in enumerate(now.devices):
                if devices == now.devices[stage]:
                    chosen[now.cut[n] : now.cut[n + 1]] = [strategy] * (now.cut[n + 1] - now.cut[n])
        elif kind < 0.6:
            chosen[first:end] = [strategy] * (end - first)
        elif kind < 0.8:  # a row of layers
            a, b = sorted((rng.randrange(first, end), rng.randrange(first, end)))
            chosen[a : b + 1] = [strategy] * (b + 1 - a)
        else:
            chosen[rng.randrange(first, end)] = strategy
        return replace(now, strategies=tuple(chosen))
