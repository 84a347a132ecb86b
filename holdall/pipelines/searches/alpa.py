"""Alpa: stages over sub-meshes by dynamic programming, and inside each stage the best way to divide it.

    between operators   minimise  sum of stages + (N - 1) slowest stage.  For every slowest time t, rising:
                        F(s, k, d) = min over (i, sub-mesh m)  t_intra(k..i, m, s) + F(s - 1, i + 1, d - m),  t_intra <= t
    inside operators    t_intra(k..i, m, s): the fastest way to divide these layers over m devices whose bytes, with the
                        activations of s micro-batches, fit; one way for the stage

Sub-meshes are parts of a node by powers of two, or whole nodes. Layers are first grouped into at most `units` of about equal
time, as the paper groups operators. When the stages are found, the layers of each pick their ways (`StageWays`, in the place
of the paper's integer programme). Recomputation is among the ways; the paper has it for all layers or for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from holdall.pipelines.cuts.balanced import even_cut
from holdall.pipelines.hybrid.plans import HybridPlan, best_judged, refused
from holdall.pipelines.hybrid.stage_ways import StageWays
from holdall.pipelines.hybrid.strategies import Pricing, Strategy
from holdall.pipelines.searches._sizes import base_seconds, micro_batch_counts, sub_meshes

Floats = npt.NDArray[np.float64]
Stage = tuple[int, int, int]  # first unit, the unit after its last, number of its sub-mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Alpa:
    name: ClassVar[str] = "alpa"
    paper: ClassVar[str] = "Alpa, OSDI 2022"

    units: int = 20  # groups of layers
    gap: float = 0.03  # slowest times that differ by less are tried once

    def __call__(self, pricing: Pricing) -> HybridPlan:
        found = best_judged(pricing, self.candidates(pricing))
        if found is None:
            raise refused(pricing)
        return found

    def candidates(self, pricing: Pricing) -> list[HybridPlan]:
        """The best plan for every number of micro-batches."""
        bounds = _grouped(pricing, self.units)
        found: list[tuple[float, HybridPlan]] = []
        cases = [_Stages(pricing, bounds, count) for count in micro_batch_counts(pricing)]
        for case in sorted(cases, key=lambda case: case.bound):
            best = min((seconds for seconds, _ in found), default=float("inf"))
            found += [made for made in (case.best(self.gap, 1.02 * best), case.whole(1.5 * best)) if made is not None]
        return [plan for _, plan in sorted(found, key=lambda entry: entry[0])]


def _grouped(pricing: Pricing, units: int) -> tuple[int, ...]:
    costs = base_seconds(pricing)
    return even_cut(costs, units) if len(costs) > units else tuple(range(len(costs) + 1))


class _Stages:
    """The programme for one number of micro-batches."""

    def __init__(self, pricing: Pricing, bounds: tuple[int, ...], count: int) -> None:
        self.pricing, self.bounds, self.count = pricing, bounds, count
        self.size = pricing.model.batch // count
        self.units = len(bounds) - 1
        cluster = pricing.cluster
        self._choosing: dict[int, StageWays] = {}
        self.meshes: list[int] = []
        self.choices: list[list[Strategy]] = []
        self.tables: list[tuple[Floats, Floats, Floats]] = []  # of each mesh: seconds, bytes, bytes held; (choice, k, i)
        for mesh in sub_meshes(cluster.devices, cluster.per_node):
            own = [(c, t) for c in pricing.strategies(mesh) if (t := self._table(c)) is not None]
            if own:
                self.meshes.append(mesh)
                self.choices.append([c for c, _ in own])
                seconds, states, held = (np.stack([table[n] for _, table in own]) for n in range(3))
                self.tables.append((seconds, states, held))
        outputs = [pricing.model.layers[end - 1].output for end in bounds[1:-1]]
        works = [mesh * seconds.min(axis=0) for mesh, (seconds, _, _) in zip(self.meshes, self.tables, strict=True)]
        units = range(self.units)
        even = sum(min(float(work[k, k + 1]) for work in works) for k in units) if works else float("inf")
        self.slowest = even / cluster.devices  # no plan's slowest stage is faster
        self.bound = count * self.slowest
        self.hops = np.array([0.0, *(2 * pricing.hop(nbytes * self.size) for nbytes in outputs)])

    def _table(self, choice: Strategy) -> tuple[Floats, Floats, Floats] | None:
        """Seconds, bytes that stay, and bytes of a micro-batch, of units k to i with one way to divide them."""
        costs = [self.pricing.cost(n, choice, self.size) for n in range(self.bounds[-1])]
        if any(cost is None for cost in costs):
            return None
        rows = np.array([(c.seconds + c.once / self.count, c.states, c.held) for c in costs if c is not None])
        sums = np.concatenate([np.zeros((1, 3)), rows.cumsum(axis=0)])[list(self.bounds)]
        most = np.array([c.extra for c in costs if c is not None])
        size = (self.units, self.units + 1)
        seconds, states, held = (np.full(size, np.inf) for _ in range(3))
        for k in range(self.units):
            ahead = sums[k + 1 :] - sums[k]
            peak = np.maximum.accumulate(most[self.bounds[k] :])[np.array(self.bounds[k + 1 :]) - self.bounds[k] - 1]
            seconds[k, k + 1 :] = ahead[:, 0]
            states[k, k + 1 :] = ahead[:, 1] + peak
            held[k, k + 1 :] = ahead[:, 2]
        return seconds, states, held

    def _intra(self, under_way: int) -> tuple[list[Floats], list[npt.NDArray[np.intp]]]:
        """Of each mesh: seconds of the fastest choice that fits with so many micro-batches, and which that is."""
        times, which = [], []
        for seconds, states, held in self.tables:
            with np.errstate(invalid="ignore"):
                fits = states + min(under_way, self.count) * held <= self.pricing.cluster.memory
            allowed = np.where(fits, seconds, np.inf)
            times.append(allowed.min(axis=0))
            which.append(allowed.argmin(axis=0))
        return times, which

    def best(self, gap: float, known: float) -> tuple[float, HybridPlan] | None:
        """(seconds by the formula, plan) of the best stages; None: nothing fits, or nothing is faster than what is `known`."""
        if not self.meshes or self.bound >= known:
            return None
        devices, most = self.pricing.cluster.devices, min(self.units, self.pricing.space.most_pipes or self.units)
        intra = [self._intra(s) for s in range(1, most + 1)]
        every = np.unique(np.concatenate([t[np.isfinite(t)] for times, _ in intra for t in times] or [np.empty(0)]))
        found: tuple[float, list[Stage]] | None = None
        last = 0.0
        for slowest in every[every >= self.slowest / (1 + gap)]:
            limit = known if found is None else min(known, found[0])
            if self.count * slowest >= limit:
                break
            if slowest < last * (1 + gap):
                continue
            last = slowest * (1 + gap)
            tried = self._under(slowest * (1 + gap), intra, devices, most)
            if tried is not None:
                pace = max(intra[len(tried) - n - 1][0][m][k, i] for n, (k, i, m) in enumerate(tried))
                total = self._sum(tried, intra) + (self.count - 1) * pace
                if found is None or total < found[0]:
                    found = (total, tried)
        return None if found is None else (found[0], self._plan(found[1], intra))

    def whole(self, known: float) -> tuple[float, HybridPlan] | None:
        """One stage over all devices, which has no bubble: a baseline for every number of micro-batches."""
        devices = self.pricing.cluster.devices
        if devices not in self.meshes or self.bound >= known:
            return None
        picked = self._layers(self.meshes.index(devices)).stage(0, self.bounds[-1], 1)
        if picked is None:
            return None
        plan = HybridPlan(cut=(0, self.bounds[-1]), devices=(devices,), strategies=picked[1], micro_batches=self.count)
        return self.count * picked[0], plan

    def _sum(self, stages: list[Stage], intra: list[tuple[list[Floats], list[npt.NDArray[np.intp]]]]) -> float:
        return float(sum(intra[len(stages) - n - 1][0][m][k, i] + self.hops[k] for n, (k, i, m) in enumerate(stages)))

    def _under(
        self, slowest: float, intra: list[tuple[list[Floats], list[npt.NDArray[np.intp]]]], devices: int, most: int
    ) -> list[Stage] | None:
        """The stages with the least sum, none slower than this, that use all devices."""
        units = self.units
        rest = np.full((units + 1, devices + 1), np.inf)  # F of the stage before: (first unit, devices)
        rest[units, 0] = 0.0
        steps: list[npt.NDArray[np.int32]] = []
        answers: list[float] = []
        for s in range(most):
            times = [np.where(t <= slowest, t, np.inf) for t in intra[s][0]]
            new = np.full((units + 1, devices + 1), np.inf)
            step = np.full((units + 1, devices + 1, 2), -1, dtype=np.int32)
            for m, mesh in enumerate(self.meshes):
                usable = np.isfinite(times[m])
                if not usable.any():
                    continue
                for k in map(int, np.flatnonzero(usable.any(axis=1))):
                    ends = np.flatnonzero(usable[k])
                    sums = times[m][k, ends, None] + rest[ends, : devices + 1 - mesh]
                    at = sums.argmin(axis=0)
                    value = sums[at, np.arange(sums.shape[1])] + self.hops[k]
                    better = value < new[k, mesh:]
                    new[k, mesh:][better] = value[better]
                    step[k, mesh:][better] = np.stack([ends[at], np.full(len(at), m)], axis=1)[better]
            steps.append(step)
            answers.append(float(new[0, devices]))
            rest = new
            if not np.isfinite(rest).any():
                break
        if not answers or min(answers) == float("inf"):
            return None
        s = int(np.argmin(answers))
        stages: list[Stage] = []
        k, left = 0, devices
        while s >= 0:
            end, m = (int(x) for x in steps[s][k, left])
            stages.append((k, end, m))
            k, left, s = end, left - self.meshes[m], s - 1
        return stages

    def _plan(self, stages: list[Stage], intra: list[tuple[list[Floats], list[npt.NDArray[np.intp]]]]) -> HybridPlan:
        strategies: list[Strategy] = []
        for n, (k, i, m) in enumerate(stages):
            first, end, under_way = self.bounds[k], self.bounds[i], len(stages) - n
            picked = self._layers(m).stage(first, end, min(self.count, under_way))
            strategies += (
                (self.choices[m][int(intra[under_way - 1][1][m][k, i])],) * (end - first) if picked is None else picked[1]
            )
        return HybridPlan(
            cut=(0, *(self.bounds[i] for _, i, _ in stages)),
            devices=tuple(self.meshes[m] for _, _, m in stages),
            strategies=tuple(strategies),
            micro_batches=self.count,
        )

    def _layers(self, mesh: int) -> StageWays:
        if mesh not in self._choosing:
            self._choosing[mesh] = StageWays(self.pricing, self.choices[mesh], self.count)
        return self._choosing[mesh]
