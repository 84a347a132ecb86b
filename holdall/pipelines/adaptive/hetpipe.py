"""HetPipe: unequal GPUs in virtual workers, each a pipeline, that exchange updates in waves (USENIX ATC 2020). Simulated.

    stages      `unequal_cut`: which device takes which layers, so that the slowest stage is fastest and every stage fits
    devices     `allocate`: a node is a worker (np), or every worker has one device of each node (ed)
    waves       `wave_runs`: a worker has up to `under_way` mini-batches under way; so many are a wave, whose updates are pushed
                together. A worker that has pushed c waves goes on when all others have pushed c - distance or more, and pulls

No mini-batch misses more than `(distance + 1) * under_way + under_way - 2` earlier ones of any worker. Not exact, but with
distance 0 and one mini-batch under way, which is synchronous data parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.cuts.layers import CutLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class HetDevice:
    kind: str
    speed: float = 1.0  # layers take their seconds divided by this
    memory: float = float("inf")  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HetStage:
    first: int
    end: int
    device: HetDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class HetPlan:
    stages: tuple[HetStage, ...]
    seconds: float  # of the slowest stage, for one mini-batch


def stage_seconds(layers: Sequence[CutLayer], stage: HetStage, bandwidth: float) -> float:
    """Computing on this device, and receiving what the stage reads."""
    own = layers[stage.first : stage.end]
    received = layers[stage.first - 1].output / bandwidth if stage.first else 0.0
    return sum(layer.forward + layer.backward for layer in own) / stage.device.speed + received


def stage_bytes(layers: Sequence[CutLayer], stage: HetStage, following: int, under_way: int) -> int:
    """Weights, and activations of the mini-batches under way: earlier stages hold more."""
    own = layers[stage.first : stage.end]
    return sum(layer.weights + min(under_way, following + 1) * layer.activations for layer in own)


def unequal_cut(
    layers: Sequence[CutLayer], devices: Sequence[HetDevice], *, under_way: int, bandwidth: float = float("inf")
) -> HetPlan:
    """The cut over all of these devices, in any order, whose slowest stage is fastest; exact, by dynamic programming.

    From the last layer to the first: what matters of the devices is how many of each kind are left.
    """
    kinds = sorted({d.kind for d in devices})
    one = {d.kind: d for d in devices}
    counts = Counter(d.kind for d in devices)
    best: dict[tuple[int, tuple[int, ...]], HetPlan] = {(len(layers), (0,) * len(kinds)): HetPlan(stages=(), seconds=0.0)}
    for following in range(len(devices)):
        grown: dict[tuple[int, tuple[int, ...]], HetPlan] = {}
        for (end, used), plan in best.items():
            for n, kind in enumerate(kinds):
                if used[n] == counts[kind]:
                    continue
                more = tuple(count + (m == n) for m, count in enumerate(used))
                for first in range(end):
                    stage = HetStage(first=first, end=end, device=one[kind])
                    if stage_bytes(layers, stage, following, under_way) > stage.device.memory:
                        continue
                    seconds = max(plan.seconds, stage_seconds(layers, stage, bandwidth))
                    if (first, more) not in grown or seconds < grown[first, more].seconds:
                        grown[first, more] = HetPlan(stages=(stage, *plan.stages), seconds=seconds)
        best = grown
    found = best.get((0, tuple(counts[kind] for kind in kinds)))
    if found is None:
        raise Infeasible(
            f"no cut of {len(layers)} layers over {len(devices)} devices fits with {under_way} mini-batches under way",
            hint="use fewer mini-batches at once, or more memory",
        )
    return found


def allocate(nodes: Sequence[Sequence[HetDevice]], policy: str) -> list[list[tuple[int, HetDevice]]]:
    """Virtual workers as lists of (node, device): "np", a node each, or "ed", one device of each node."""
    if policy == "np":
        return [[(n, device) for device in node] for n, node in enumerate(nodes)]
    if policy != "ed" or len({len(node) for node in nodes}) != 1:
        raise InvalidInput(
            f"the policy {policy!r} is not known, or nodes differ in size", hint='use "np", or "ed" with equal nodes'
        )
    return [[(n, node[w]) for n, node in enumerate(nodes)] for w in range(len(nodes[0]))]


def bytes_across(workers: Sequence[Sequence[tuple[int, HetDevice]]], weights: Sequence[int], *, local: bool) -> int:
    """Bytes of parameters that leave their node in a push and a pull of all workers; `weights`: of the stages, in order.

    `local`: a stage's parameters are served where the first worker has that stage; else they are spread over all nodes.
    """
    nodes = {node for worker in workers for node, _ in worker}
    found = 0
    for worker in workers:
        for s, (node, _) in enumerate(worker):
            away = float(node != workers[0][s][0]) if local else 1 - 1 / len(nodes)
            found += round(2 * weights[s] * away)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveRun:
    """A mini-batch of a virtual worker."""

    worker: int
    number: int
    start: float
    end: float
    pulled: int  # waves of all workers that its weights have
    own: int  # mini-batches of its own worker that its weights have

    def missing(self, under_way: int) -> int:
        """Earlier mini-batches of another worker that its weights do not have."""
        return max(0, self.number - self.pulled * under_way)


def most_missing(distance: int, under_way: int) -> int:
    """The paper's bound of staleness between workers, in mini-batches."""
    local = under_way - 1
    return (distance + 1) * (local + 1) + local - 1 if under_way > 1 or distance else 0


def wave_runs(
    workers: int, mini_batches: int, *, under_way: int, distance: int, seconds: Callable[[int, int], tuple[float, float]]
) -> list[WaveRun]:
    """All mini-batches of all workers, in the order of their numbers.

    `seconds(worker, number)`: (until the next mini-batch may begin, until this one is over), as the worker's pipeline takes.
    """
    found: list[WaveRun] = []
    starts = [[0.0] * mini_batches for _ in range(workers)]
    ends = [[0.0] * mini_batches for _ in range(workers)]
    paces = [[0.0] * mini_batches for _ in range(workers)]
    pulled = [0] * workers

    def pushed(worker: int, waves: int) -> float:
        """When a worker has pushed so many waves."""
        return max(accumulate(ends[worker][: waves * under_way], max), default=0.0)

    for number in range(mini_batches):
        before = list(pulled)
        for w in range(workers):
            start = starts[w][number - 1] + paces[w][number - 1] if number else 0.0
            if number >= under_way:
                start = max(start, ends[w][number - under_way])
            if (number + 1) % under_way == 0:  # the last of the wave before is over: push, wait, pull
                waves = (number + 1) // under_way - 1
                needed = max(0, waves - distance)
                start = max([start, *(pushed(v, needed) for v in range(workers))])
                there = [k for k in range(needed, waves + 1) if all(pushed(v, k) <= start for v in range(workers))]
                before[w] = max([pulled[w], *there])
            pace, length = seconds(w, number)
            starts[w][number], paces[w][number], ends[w][number] = start, pace, start + length
            own = max(0, number + 1 - under_way)
            found.append(WaveRun(worker=w, number=number, start=start, end=start + length, pulled=before[w], own=own))
        pulled = before
    return found
