"""PipeDream's planner: stages and replicas whose slowest stage, or message, is fastest; exact, by dynamic programming.

A stage of m replicas takes (computing + 4 (m - 1) weights / (bandwidth m)) / m seconds per mini-batch: its gradients are summed
over the replicas. Between stages, 2 output / (bandwidth m) for the m replicas of the later one, both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from holdall.errors import Infeasible
from holdall.pipelines.cuts.layers import CutLayer, CutPlan, CutStage


def pipedream_cut(layers: Sequence[CutLayer], machines: int, *, bandwidth: float = inf, memory: float = inf) -> CutPlan:
    """The plan for all machines. `memory`: bytes of one, for the stashed versions and activations of its stage."""
    count = len(layers)
    best: dict[tuple[int, int], tuple[float, tuple[CutStage, ...]]] = {(0, 0): (0.0, ())}
    for end in range(1, count + 1):
        for used in range(1, machines + 1):
            found: tuple[float, tuple[CutStage, ...]] = (inf, ())
            for first in range(end):
                for replicas in range(1, used + 1):
                    before = best.get((first, used - replicas))
                    if before is None or not _fits(layers, first, end, replicas, machines - used + replicas, memory):
                        continue
                    stage = CutStage(first=first, end=end, replicas=replicas)
                    seconds = max(before[0], stage_seconds(layers, stage, bandwidth), hop_seconds(layers, stage, bandwidth))
                    if seconds < found[0]:
                        found = (seconds, (*before[1], stage))
            if found[1]:
                best[end, used] = found
    plan = best.get((count, machines))
    if plan is None:
        raise Infeasible(
            f"no cut of {count} layers fits {machines} machines of {memory:g} bytes", hint="use more memory, or more machines"
        )
    return CutPlan(stages=plan[1], seconds=plan[0])


def stage_seconds(layers: Sequence[CutLayer], stage: CutStage, bandwidth: float) -> float:
    own = layers[stage.first : stage.end]
    m = stage.replicas
    summed = 4 * (m - 1) * sum(layer.weights for layer in own) / (bandwidth * m)
    return (sum(layer.forward + layer.backward for layer in own) + summed) / m


def hop_seconds(layers: Sequence[CutLayer], stage: CutStage, bandwidth: float) -> float:
    """Of the message into a stage, and of its gradient."""
    return 2 * layers[stage.first - 1].output / (bandwidth * stage.replicas) if stage.first else 0.0


def _fits(layers: Sequence[CutLayer], first: int, end: int, replicas: int, from_here: int, memory: float) -> bool:
    """Do the mini-batches that are under way fit? As many as machines from this stage to the end, by replica."""
    under_way = ceil(from_here / replicas)
    return under_way * sum(layer.weights + layer.activations for layer in layers[first:end]) <= memory
