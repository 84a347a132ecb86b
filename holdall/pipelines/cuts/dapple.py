"""DAPPLE's planner: the cut, with replicas, whose synchronous step is shortest by the paper's formula.

    step = warm-up + steady + end, around a pivot Q, the stage that sets the pace:
    warm-up   forwards of the stages up to Q
    steady    (N - 1) (forward + backward) of Q
    end       the latest stage: its all-reduce, after the backwards from Q to it; stages behind Q end earlier

Messages are stages of their own, with equal forward and backward. A replica takes its share of every micro-batch.
The search is exact: depth first over stages, left as soon as what is placed cannot beat the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from holdall.pipelines.cuts.layers import CutLayer, CutPlan, CutStage

Pace = tuple[float, float, float]  # forward, backward, all-reduce


def dapple_cut(layers: Sequence[CutLayer], machines: int, micro_batches: int, *, bandwidth: float = inf) -> CutPlan:
    """The best plan over all cuts and replicas; every machine is used."""
    best = CutPlan(stages=(), seconds=inf)
    total = [layer.forward + layer.backward for layer in layers]

    def extend(done: tuple[CutStage, ...], first: int, left: int) -> None:
        nonlocal best
        if first == len(layers):
            if not left:
                seconds = step_seconds(layers, done, micro_batches, bandwidth)
                if seconds < best.seconds:
                    best = CutPlan(stages=done, seconds=seconds)
            return
        for stage in _next(first, len(layers), left):
            slowest = sum(total[stage.first : stage.end]) / stage.replicas
            if micro_batches * slowest < best.seconds:  # no step is shorter than all micro-batches on one of its stages
                extend((*done, stage), stage.end, left - stage.replicas)

    extend((), 0, machines)
    return best


def _next(first: int, count: int, left: int) -> Iterator[CutStage]:
    for end in range(first + 1, count + 1):
        replicas = range(1, left) if end < count else range(left, left + 1)
        for m in replicas:
            if m >= 1:
                yield CutStage(first=first, end=end, replicas=m)


def step_seconds(layers: Sequence[CutLayer], stages: Sequence[CutStage], micro_batches: int, bandwidth: float) -> float:
    """The paper's estimate of a step."""
    paces = paces_of(layers, stages, bandwidth)
    pivot = pivot_of(paces, micro_batches)
    forward, backward, _ = paces[pivot]
    warm_up = sum(f for f, _, _ in paces[: pivot + 1])
    steady = (micro_batches - 1) * (forward + backward)
    ends = []
    for s, (_, _, reduce) in enumerate(paces):
        if s <= pivot:
            ends.append(reduce + sum(b for _, b, _ in paces[s : pivot + 1]))
        else:
            ends.append(reduce - sum(b for _, b, _ in paces[pivot + 1 : s + 1]))
    return warm_up + steady + max(ends)


def paces_of(layers: Sequence[CutLayer], stages: Sequence[CutStage], bandwidth: float) -> list[Pace]:
    """Of stages and, between them, of messages."""
    found: list[Pace] = []
    for stage in stages:
        own = layers[stage.first : stage.end]
        if stage.first:
            hop = layers[stage.first - 1].output / bandwidth
            if hop:
                found.append((hop, hop, 0.0))
        m = stage.replicas
        reduce = 2 * (m - 1) / m * sum(layer.weights for layer in own) / bandwidth
        found.append((sum(layer.forward for layer in own) / m, sum(layer.backward for layer in own) / m, reduce))
    return found


def recursion_seconds(paces: Sequence[Pace], micro_batches: int) -> float:
    """A step by the recursions of the released planner instead of the formula: when each forward and backward ends.

    A forward waits for the one before it, for the same micro-batch on the stage before, and, once a stage has begun as many as
    there are stages from it to the end, for the backward that makes room; backwards mirror that.
    """
    stages, last = len(paces), micro_batches - 1
    forward = [[0.0] * stages for _ in range(micro_batches)]
    backward = [[0.0] * stages for _ in range(micro_batches)]
    for turn in range(micro_batches):
        for s, (seconds, _, _) in enumerate(paces):
            most = stages - s  # forwards before the first backward
            for i in range(turn + most - 1 if turn else 0, min(last, turn + most - 1) + 1):
                room = backward[i - most][s] if i >= most else 0.0
                forward[i][s] = max(forward[i][s - 1] if s else 0.0, forward[i - 1][s] if i else 0.0, room) + seconds
        for s in range(stages - 1, -1, -1):
            own = forward[min(last, turn + stages - s - 1)][s]  # the task before this one on the same stage
            after = backward[turn][s + 1] if s + 1 < stages else 0.0
            backward[turn][s] = max(own, after, backward[turn - 1][s] if turn else 0.0) + paces[s][1]
    return max(backward[last][s] + reduce for s, (_, _, reduce) in enumerate(paces))


def pivot_of(paces: Sequence[Pace], micro_batches: int) -> int:
    """From the last stage to the first: one that is slower than the pivot by more than what lies between is the pivot."""
    pivot = len(paces) - 1
    for s in range(len(paces) - 2, -1, -1):
        steady = [(micro_batches - 1) * (paces[x][0] + paces[x][1]) for x in (s, pivot)]
        if steady[0] > steady[1] + sum(f + b for f, b, _ in paces[s + 1 : pivot]):
            pivot = s
    return pivot
