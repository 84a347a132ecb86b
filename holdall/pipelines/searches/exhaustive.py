"""All plans, each simulated: what the other searches are held against. For a few layers and devices only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import ClassVar

from holdall.errors import InvalidInput
from holdall.pipelines.hybrid.plans import HybridPlan, judged, refused
from holdall.pipelines.hybrid.strategies import Pricing
from holdall.pipelines.searches._sizes import micro_batch_counts, sub_meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive:
    name: ClassVar[str] = "exhaustive"
    paper: ClassVar[str] = ""

    most: int = 200_000  # plans; more are refused
    equal: bool = False  # groups of devices, as in Galvatron

    def __call__(self, pricing: Pricing) -> HybridPlan:
        best: HybridPlan | None = None
        for plan in self._plans(pricing):
            found = judged(pricing, plan)
            if found is not None and found.peak <= pricing.cluster.memory and (best is None or found.seconds < best.seconds):
                best = found
        if best is None:
            raise refused(pricing)
        return best

    def candidates(self, pricing: Pricing) -> list[HybridPlan]:
        return list(self._plans(pricing))

    def _plans(self, pricing: Pricing) -> Iterator[HybridPlan]:
        for tried, plan in enumerate(every_plan(pricing)):
            if tried >= self.most:
                raise InvalidInput(f"there are more than {self.most} plans", hint="use another search, or fewer layers")
            if not self.equal or len(set(plan.devices)) == 1:
                yield plan


def every_plan(pricing: Pricing) -> Iterator[HybridPlan]:
    """Cuts, sub-meshes that fill the cluster, a way for each layer, and numbers of micro-batches; 1F1B."""
    cluster, layers = pricing.cluster, len(pricing.model.layers)
    sizes = sub_meshes(cluster.devices, cluster.per_node)
    for pipes in range(1, min(layers, cluster.devices, pricing.space.most_pipes or layers) + 1):
        for inner in combinations(range(1, layers), pipes - 1):
            cut = (0, *inner, layers)
            for devices in product(sizes, repeat=pipes):
                if sum(devices) != cluster.devices:
                    continue
                ways = [pricing.strategies(devices[s]) for s in range(pipes) for _ in range(cut[s], cut[s + 1])]
                for strategies in product(*ways):
                    for count in micro_batch_counts(pricing):
                        yield HybridPlan(cut=cut, devices=devices, strategies=strategies, micro_batches=count)
