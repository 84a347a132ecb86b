"""A plan of stages over devices, and what it takes: the step by the pipelines' simulator, and the bytes of every rank.

step     the simulated pipeline; before it the gathers of parameters that its first forward waits for, after it the
         all-reduces that do not hide behind the last backward, and the update
bytes    states of the rank's layers, activations as the schedule holds them, and the most that a layer needs for a while
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.hybrid.strategies import LayerCost, Pricing, Strategy
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.schedules import pipeline
from holdall.pipelines.simulator import PipeTimeline, simulate
from holdall.units import format_bytes

FLUSHED = "one_f_one_b"


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPlan:
    """Stages, the devices of each rank of the pipeline, and how every layer is divided over those."""

    cut: tuple[int, ...]  # bounds of the stages
    devices: tuple[int, ...]  # rank of the pipeline -> its devices
    strategies: tuple[Strategy, ...]  # layer -> how the devices of its stage share it
    micro_batches: int
    schedule: str = FLUSHED
    seconds: float = 0.0  # of a step, simulated
    peaks: tuple[int, ...] = ()  # rank -> bytes of each of its devices

    @property
    def pipes(self) -> int:
        return len(self.devices)

    @property
    def peak(self) -> int:
        return max(self.peaks, default=0)

    @property
    def mesh(self) -> dict[str, int] | None:
        """Sizes by dimension, where all layers are divided alike."""
        shapes = {(s.data, s.tensor) for s in self.strategies}
        if len(shapes) > 1 or len(set(self.devices)) > 1:
            return None
        ((data, tensor),) = shapes
        return {"pp": self.pipes, "dp": data, "tp": tensor}

    def described(self) -> list[tuple[str, str]]:
        """(layers, how they are divided), stage by stage."""
        found = []
        for first, end in pairwise(self.cut):
            for strategy, run in groupby(range(first, end), key=lambda n: self.strategies[n]):
                own = list(run)
                found.append((f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}", str(strategy)))
        return found


class StageCost(NamedTuple):
    """Of one stage and one micro-batch."""

    forward: float
    backward: float
    weight: float
    lead: float  # seconds that the first forward waits for parameters
    tail: float  # seconds from the last backward to the last gradient's sum
    update: float
    states: float
    held: float
    extra: float


@lru_cache(maxsize=512)
def made_pipeline(name: str, ranks: int, micro_batches: int) -> Pipeline | None:
    """None: the schedule is not defined for these sizes."""
    try:
        return pipeline(name, ranks=ranks, micro_batches=micro_batches)
    except InvalidInput:
        return None


def stage_cost(pricing: Pricing, strategies: Sequence[Strategy], first: int, size: int) -> StageCost | None:
    """Of the layers from `first` on, one for each strategy; None: one of them cannot be so divided."""
    runs: list[tuple[LayerCost, int]] = []  # neighbours with one price
    moved = 0.0
    before: Strategy | None = None
    for n, strategy in enumerate(strategies):
        cost = pricing.cost(first + n, strategy, size)
        if cost is None:
            return None
        if runs and runs[-1][0] is cost:
            runs[-1] = (cost, runs[-1][1] + 1)
        else:
            runs.append((cost, 1))
            if before is not None and before.data != strategy.data:
                moved += pricing.relayout(first + n - 1, before, strategy, size)
        before = strategy
    return StageCost(
        forward=sum(n * c.forward for c, n in runs) + moved / 2,
        backward=sum(n * c.backward for c, n in runs) + moved / 2,
        weight=sum(n * c.weight for c, n in runs),
        lead=sum(n * c.lead for c, n in runs),
        tail=_tail(runs),
        update=sum(n * c.update for c, n in runs),
        states=sum(n * c.states for c, n in runs),
        held=sum(n * c.held for c, n in runs),
        extra=max(c.extra for c, _ in runs),
    )


def _tail(runs: Sequence[tuple[LayerCost, int]]) -> float:
    """Seconds from the last backward to the last sum: sums follow the layers that make the gradients."""
    clock = lane = 0.0
    for c, n in reversed(runs):
        waits = clock + max(c.backward + n * c.tail, n * c.backward + c.tail)
        clock += n * c.backward
        lane = max(lane + n * c.tail, waits)
    return lane - clock if lane > clock else 0.0


def stages_of(pricing: Pricing, plan: HybridPlan) -> list[StageCost] | None:
    if pricing.model.batch % plan.micro_batches:
        return None
    size = pricing.model.batch // plan.micro_batches
    found = [stage_cost(pricing, plan.strategies[a:b], a, size) for a, b in pairwise(plan.cut)]
    return None if any(cost is None for cost in found) else [cost for cost in found if cost is not None]


def formula(pricing: Pricing, plan: HybridPlan) -> tuple[float, float]:
    """(seconds, bytes) of a plan with 1F1B, without simulating: all stages once, and the slowest for the other micro-batches.

    Infinite: some layer cannot be so divided.
    """
    stages = stages_of(pricing, plan)
    if stages is None:
        return float("inf"), float("inf")
    paces = [s.forward + s.backward for s in stages]
    hops = 2 * sum(map(pricing.hop, _messages(pricing, plan)))
    ends = max(s.tail + s.update for s in stages) + max(s.lead for s in stages)
    peak = max(s.states + min(plan.micro_batches, len(stages) - n) * s.held + s.extra for n, s in enumerate(stages))
    return sum(paces) + hops + (plan.micro_batches - 1) * max(paces) + ends, peak


def _messages(pricing: Pricing, plan: HybridPlan) -> list[float]:
    """Bytes between stages, of the devices that send or receive most."""
    size = pricing.model.batch // plan.micro_batches
    return [
        pricing.model.layers[end - 1].output * size / min(plan.strategies[end - 1].data, plan.strategies[end].data)
        for end in plan.cut[1:-1]
    ]


class PlayedPlan(NamedTuple):
    """The simulated pipeline of a plan."""

    timeline: PipeTimeline
    costs: PipeCosts
    stages: tuple[StageCost, ...]

    def of_rank(self, rank: int) -> list[StageCost]:
        return [self.stages[s] for s in self.timeline.pipeline.stages_of(rank)]

    def fixed(self, rank: int) -> int:
        """Bytes of a rank's states, and the most that one of its layers needs for a while."""
        own = self.of_rank(rank)
        return int(sum(s.states for s in own) + max(s.extra for s in own))


def played(pricing: Pricing, plan: HybridPlan) -> PlayedPlan | None:
    """The plan's pipeline, simulated; None: it cannot be made."""
    made = made_pipeline(plan.schedule, plan.pipes, plan.micro_batches)
    stages = stages_of(pricing, plan)
    if made is None or stages is None or made.copies > 1 or made.chain != len(stages):
        return None
    sent = [*_messages(pricing, plan), 0]
    costs = tuple(
        StageCosts(forward=s.forward, input=s.backward - s.weight, weight=s.weight, activations=int(s.held), sent=int(nbytes))
        for s, nbytes in zip(stages, sent, strict=True)
    )
    cluster = pricing.cluster
    network = cluster.inside if cluster.devices <= cluster.per_node else cluster.between
    priced = PipeCosts(stages=costs, network=network)
    return PlayedPlan(simulate(made, priced), priced, tuple(stages))


def judged(pricing: Pricing, plan: HybridPlan) -> HybridPlan | None:
    """The plan with its simulated seconds and the bytes of its ranks; None: it cannot be made."""
    if plan.pipes == 1:
        stages = stages_of(pricing, plan)
        made = made_pipeline(plan.schedule, 1, plan.micro_batches)
        if made is None or stages is None or made.copies > 1 or made.chain != len(stages):
            return None
        (only,) = stages
        seconds = only.lead + plan.micro_batches * (only.forward + only.backward) + only.tail + only.update
        return replace(plan, seconds=seconds, peaks=(int(only.states + only.held + only.extra),))
    found = played(pricing, plan)
    if found is None:
        return None
    last = [0.0] * plan.pipes
    for span in found.timeline.spans:
        last[span.rank] = max(last[span.rank], span.end)
    own = [found.of_rank(r) for r in range(plan.pipes)]
    ends = [last[r] + own[r][0].tail + sum(s.update for s in own[r]) for r in range(plan.pipes)]
    peaks = [
        int(sum(s.states for s in own[r]) + found.timeline.peak[r] + max(s.extra for s in own[r])) for r in range(plan.pipes)
    ]
    return replace(plan, seconds=max(s.lead for s in found.stages) + max(ends), peaks=tuple(peaks))


def least_seconds(pricing: Pricing, plan: HybridPlan) -> float:
    """No schedule makes the plan's step shorter: all micro-batches on the rank with most work."""
    made, stages = made_pipeline(plan.schedule, plan.pipes, plan.micro_batches), stages_of(pricing, plan)
    if made is None or stages is None or made.chain != len(stages):
        return float("inf")
    paces = [sum(stages[s].forward + stages[s].backward for s in made.stages_of(r)) for r in range(plan.pipes)]
    return plan.micro_batches * max(paces) + max(s.lead for s in stages)


def best_judged(pricing: Pricing, plans: Sequence[HybridPlan], *, most: int = 4) -> HybridPlan | None:
    """The fastest that fits of the `most` plans that look fastest by the formula; None: none fits."""
    looked = sorted((seconds, n) for n, plan in enumerate(plans) if (seconds := formula(pricing, plan)[0]) < float("inf"))
    found: HybridPlan | None = None
    for tried, (_, n) in enumerate(looked):
        if tried >= most and found is not None:
            break
        if found is not None and least_seconds(pricing, plans[n]) >= found.seconds:
            continue
        plan = judged(pricing, plans[n])
        if plan is not None and plan.peak <= pricing.cluster.memory and (found is None or plan.seconds < found.seconds):
            found = plan
    return found


def refused(pricing: Pricing) -> Infeasible:
    cluster = pricing.cluster
    return Infeasible(
        f"no mesh of {cluster.devices} devices was found that fits {format_bytes(cluster.memory)} on each",
        hint="use more devices, more memory, or a smaller batch",
    )
