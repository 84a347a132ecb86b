"""The default: the candidates of all published searches, with their schedule and with others, and the fastest of them.

The published searches know 1F1B alone. Here the plans that look best are also tried with interleaved and zero-bubble
schedules, cut anew into as many stages as these have, and simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.pipelines.hybrid.plans import HybridPlan, best_judged, formula, judged, least_seconds, made_pipeline, refused
from holdall.pipelines.hybrid.strategies import Pricing
from holdall.pipelines.searches._sizes import even_stages
from holdall.pipelines.searches.alpa import Alpa
from holdall.pipelines.searches.flexflow import FlexFlow
from holdall.pipelines.searches.galvatron import Galvatron

SCHEDULES = ("interleaved:chunks=2", "interleaved:chunks=4", "zb_h1", "zb_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoMesh:
    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = ""

    most: int = 4  # plans of each search that are simulated, and of all of them with other schedules
    schedules: tuple[str, ...] = SCHEDULES

    def __call__(self, pricing: Pricing) -> HybridPlan:
        best: HybridPlan | None = None
        looked: list[tuple[float, HybridPlan]] = []
        for search in (Galvatron(), Alpa(), FlexFlow()):
            found = search.candidates(pricing)
            looked += [(formula(pricing, plan)[0], plan) for plan in found]
            best = self._best(pricing, found, best)
        if best is None:
            raise refused(pricing)
        looked.sort(key=lambda entry: entry[0])
        near = [plan for seconds, plan in looked if plan.pipes > 1 and seconds < 1.5 * best.seconds]
        for plan in list(dict.fromkeys(near))[: self.most]:
            for name in self.schedules:
                other = with_schedule(pricing, plan, name)
                if other is None or least_seconds(pricing, other) >= best.seconds:
                    continue
                tried = judged(pricing, other)
                if tried is not None and tried.peak <= pricing.cluster.memory and tried.seconds < best.seconds:
                    best = tried
        return best

    def ranked(self, pricing: Pricing, may_run: Callable[[HybridPlan], bool]) -> list[HybridPlan]:
        """All candidates that may be run, also with the other schedules, the fastest first, fitting or not."""
        own = [plan for plan in dict.fromkeys(self.candidates(pricing)) if plan.pipes >= pricing.space.least_pipes]
        others = [with_schedule(pricing, plan, name) for plan in own for name in self.schedules]
        tried = [judged(pricing, plan) for plan in (*own, *others) if plan is not None and may_run(plan)]
        return sorted((plan for plan in tried if plan is not None), key=lambda plan: plan.seconds)

    def candidates(self, pricing: Pricing) -> list[HybridPlan]:
        return [plan for search in (Galvatron(), Alpa(), FlexFlow()) for plan in search.candidates(pricing)]

    def _best(self, pricing: Pricing, plans: list[HybridPlan], best: HybridPlan | None) -> HybridPlan | None:
        """As a search picks among its own candidates."""
        found = best_judged(pricing, plans, most=self.most)
        return min((p for p in (best, found) if p is not None), key=lambda p: p.seconds, default=None)


def with_schedule(pricing: Pricing, plan: HybridPlan, name: str) -> HybridPlan | None:
    """The plan with another schedule; None: it has not the sizes, or ranks have different devices."""
    made = made_pipeline(name, plan.pipes, plan.micro_batches)
    if made is None or made.chain > len(plan.strategies) or len(set(plan.devices)) > 1:
        return None
    cut = plan.cut if made.chain == plan.pipes else even_stages(pricing, made.chain)
    return replace(plan, cut=cut, schedule=name)
