"""The two hand-made schedules of the zero-bubble paper: backward in halves, and weight gradients in the bubbles."""

from __future__ import annotations

from holdall.pipelines.tasks import FORWARD, INPUT, WEIGHT, PipeTask


def in_halves(stage: int, first: int, without: int, micro_batches: int) -> list[PipeTask]:
    """`first` forwards, then pairs of F and I, with a W each after the first `without` pairs; then what is left."""
    ahead = min(first, micro_batches)
    tasks = [PipeTask(stage, FORWARD, m) for m in range(ahead)]
    weights = 0
    for m in range(micro_batches):
        if ahead + m < micro_batches:
            tasks.append(PipeTask(stage, FORWARD, ahead + m))
        tasks.append(PipeTask(stage, INPUT, m))
        if ahead + m >= micro_batches or m >= without:
            tasks.append(PipeTask(stage, WEIGHT, weights))
            weights += 1
    return tasks + [PipeTask(stage, WEIGHT, m) for m in range(weights, micro_batches)]
