"""Galvatron: for every number of stages, each layer picks its way to divide, by a decision tree and dynamic programming.

tree     a group of G devices is divided by data, sharded data and tensor ranks, each at most once, in any order, by powers
         of two; data and sharded data are not mixed; each with and without recomputation
layers   C(l, e, S) = min over the way S' of the layer before  C(l - 1, e - bytes(l, S), S') + seconds(l, S) + change(S', S)
         over the bytes e that are left, in steps that round up
stages   equal groups; cut by time and by memory, then bound by bound towards a shorter step while the bytes fit (BMW)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, permutations, product
from typing import ClassVar

from holdall.pipelines.cuts.balanced import even_cut
from holdall.pipelines.hybrid.plans import HybridPlan, best_judged, formula, refused
from holdall.pipelines.hybrid.stage_ways import StageWays
from holdall.pipelines.hybrid.strategies import DDP, Pricing, Strategy
from holdall.pipelines.searches._sizes import even_stages, micro_batch_counts, pipe_counts

DATA, SHARDED, TENSOR = "dp", "sdp", "tp"
Branch = tuple[tuple[str, int], ...]  # (paradigm, degree), outermost first


def decision_tree(devices: int) -> list[Branch]:
    """The orders in which a group is divided; data and sharded data exclude each other."""
    if devices == 1:
        return [()]
    found: list[Branch] = []
    for count in (1, 2):
        for names in permutations((DATA, SHARDED, TENSOR), count):
            if {DATA, SHARDED} <= set(names):
                continue
            found += [tuple(zip(names, degrees, strict=True)) for degrees in _products(devices, count)]
    return found


def _products(devices: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(devices,)]
    return [
        (first, *rest) for first in _powers(devices) if devices % first == 0 for rest in _products(devices // first, count - 1)
    ]


def _powers(devices: int) -> list[int]:
    return [2**n for n in range(1, devices.bit_length()) if 2**n < devices]


def branches_of(pricing: Pricing, devices: int) -> tuple[Strategy, ...]:
    """Strategies of the tree's branches: of orders that cost the same, one; sharded data is zero2 or zero3."""
    names = {DATA, SHARDED}
    found = {(dict(branch).get(TENSOR, 1), *(name for name, _ in branch if name in names)) for branch in decision_tree(devices)}

    def paradigm(s: Strategy) -> tuple[int | str, ...]:
        return (s.tensor,) if s.data == 1 else (s.tensor, DATA if s.way == DDP else SHARDED)

    return tuple(s for s in pricing.strategies(devices) if paradigm(s) in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Galvatron:
    name: ClassVar[str] = "galvatron"
    paper: ClassVar[str] = "Galvatron, VLDB 2023; Galvatron-BMW, TKDE 2024"

    steps: int = 256  # of memory, for 16 layers; more for more layers
    moves: int = 8  # of bounds between stages, at most

    def __call__(self, pricing: Pricing) -> HybridPlan:
        found = best_judged(pricing, self.candidates(pricing))
        if found is None:
            raise refused(pricing)
        return found

    def candidates(self, pricing: Pricing) -> list[HybridPlan]:
        """The best plan for every number of stages and of micro-batches."""
        found: list[tuple[float, HybridPlan]] = []
        cases = [
            _EqualStages(pricing, pricing.cluster.devices // pipes, pipes, count, self.steps)
            for pipes, count in product(pipe_counts(pricing), micro_batch_counts(pricing))
        ]
        for bound, _, case in sorted((case.bound(), n, case) for n, case in enumerate(cases)):
            if bound < 1.02 * min((seconds for seconds, _ in found), default=float("inf")):
                found += self._cut(pricing, case)
        return [plan for _, plan in sorted(found, key=lambda entry: entry[0])]

    def _cut(self, pricing: Pricing, layers: _EqualStages) -> list[tuple[float, HybridPlan]]:
        """Plans from the cuts by time and by memory, with bounds moved while that helps."""
        weights = [layer.parameters + layer.activations / 16 for layer in pricing.model.layers]
        starts = {even_stages(pricing, layers.pipes), even_cut(weights, layers.pipes)}
        found = []
        for start in sorted(starts):
            best, cut = layers.plan(start), start
            for _ in range(self.moves if layers.pipes > 1 else 0):
                tried = [(layers.plan(near), near) for near in _neighbours(cut, layers.slowest(cut))]
                better = [(plan, near) for plan, near in tried if plan is not None and (best is None or plan[0] < best[0])]
                if not better:
                    break
                best, cut = min(better, key=lambda entry: entry[0][0] if entry[0] else 0.0)
            if best is not None:
                found.append(best)
        return found


def _neighbours(cut: tuple[int, ...], slowest: int) -> list[tuple[int, ...]]:
    """Cuts in which the slowest stage has a layer less: the stage before it or after it, or one further on, has one more."""
    found = []
    for other in range(max(0, slowest - 2), min(len(cut) - 1, slowest + 3)):
        by = -1 if other > slowest else 1
        moved = range(slowest + 1, other + 1) if other > slowest else range(other + 1, slowest + 1)
        near = tuple(bound + by if n in moved else bound for n, bound in enumerate(cut))
        if other != slowest and all(a < b for a, b in pairwise(near)):
            found.append(near)
    return found


class _EqualStages:
    """Equal stages for one number of them, and of micro-batches."""

    def __init__(self, pricing: Pricing, devices: int, pipes: int, count: int, steps: int) -> None:
        self.pricing, self.devices, self.pipes, self.count = pricing, devices, pipes, count
        self.layers = StageWays(pricing, branches_of(pricing, devices), count, steps)

    def bound(self) -> float:
        """No step is shorter: the work of all layers, shared evenly by the stages."""
        return self.layers.least() / self.pipes * self.count

    def plan(self, cut: tuple[int, ...]) -> tuple[float, HybridPlan] | None:
        """The plan with the best ways for these stages, and its seconds by the formula; None: some stage does not fit."""
        strategies: list[Strategy] = []
        for first, end, under_way in self._spans(cut):
            picked = self.layers.stage(first, end, under_way)
            if picked is None:
                return None
            strategies += picked[1]
        made = HybridPlan(cut=cut, devices=(self.devices,) * self.pipes, strategies=tuple(strategies), micro_batches=self.count)
        return formula(self.pricing, made)[0], made

    def slowest(self, cut: tuple[int, ...]) -> int:
        """The stage with the longest time; one that does not fit comes before all others."""
        picked = [self.layers.stage(*span) for span in self._spans(cut)]
        return max(range(self.pipes), key=lambda n: float("inf") if (own := picked[n]) is None else own[0])

    def _spans(self, cut: tuple[int, ...]) -> list[tuple[int, int, int]]:
        return [(first, end, min(self.count, self.pipes - n)) for n, (first, end) in enumerate(pairwise(cut))]
