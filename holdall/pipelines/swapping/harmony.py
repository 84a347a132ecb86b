"""Harmony (Li et al., VLDB 2022, arXiv 2202.01306): a model that rests in host memory passes over the GPUs in packs of layers,
and every pack is brought in once for all micro-batches. Simulated; `pipelines/running/packs.py` runs the same order.

    forward    pack after pack, each for all micro-batches, round the GPUs; the inputs of backward packs go to the host
    backward   pack after pack from the last, on the GPUs that follow in the round: a micro-batch's pack is computed again from
               its stashed input and then backward; the last pack has no forward of its own, so its weights come in once
    update     of a pack by the host, as soon as its gradients are there

Forward and backward have packs and micro-batches of their own. `plan_harmony` tries the paper's ways to pack with all sizes
that divide the batch, simulates each, and keeps the fastest. Every GPU has a link to the host, each way at once, and one to
every other GPU; contention at a shared root is not modelled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.swapping.hosted import HostedGpus, HostedLayer, backward_bytes, forward_bytes

Packs = tuple[tuple[int, ...], ...]
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyPlan:
    forward_size: int  # samples of a micro-batch
    forward_packs: Packs  # layers but those of the last backward pack
    backward_size: int
    backward_packs: Packs  # in the order of the layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTask:
    """All micro-batches of one pack on one GPU."""

    kind: str  # FORWARD or BACKWARD
    pack: tuple[int, ...]
    gpu: int
    start: float  # of its first micro-batch
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyOutcome:
    """A simulated step."""

    plan: HarmonyPlan
    seconds: float
    tasks: tuple[PackTask, ...]
    weights_in: int  # bytes of weights that come from the host
    gradients_out: int
    stashed: int  # bytes of activations that go to the host, and come back


def greedy(sizes: Sequence[int], capacity: int) -> Packs:
    """As many layers in a pack as stay below the capacity, from the front."""
    packs: list[list[int]] = []
    filled = capacity
    for number, size in enumerate(sizes):
        if size >= capacity:
            raise Infeasible(f"layer {number} has {size} bytes, and a pack fewer than {capacity}", hint="use more memory")
        if filled + size >= capacity:
            packs.append([])
            filled = 0
        packs[-1].append(number)
        filled += size
    return tuple(map(tuple, packs))


def greedy_from_back(sizes: Sequence[int], capacity: int) -> Packs:
    last = len(sizes) - 1
    return tuple(tuple(last - i for i in reversed(pack)) for pack in reversed(greedy(sizes[::-1], capacity)))


def balanced(weights: Sequence[float], sizes: Sequence[int], capacity: int) -> Packs:
    """The fewest packs of about equal sums of `weights` (bytes or seconds) that all stay below the capacity: cut where the sums
    from the front come nearest to equal parts."""
    sums = [*accumulate(weights)]
    for count in range(max(1, ceil(sum(sizes) / capacity)), len(sizes) + 1):
        cuts = [0]
        for part in range(1, count):
            goal = sums[-1] * part / count
            at = bisect_left(sums, goal)  # the layer with which the sum reaches the goal
            over, under = sums[at] - goal, goal - (sums[at - 1] if at else 0.0)
            cuts.append(at + 1 if over <= under else at)
        cuts.append(len(sizes))
        if all(a < b and sum(sizes[a:b]) < capacity for a, b in pairwise(cuts)):
            return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))
    raise Infeasible(f"a layer has {max(sizes)} bytes, and a pack fewer than {capacity}", hint="use more memory")


def packings(layers: Sequence[HostedLayer], samples: int, capacity: int, *, is_forward: bool) -> Iterator[Packs]:
    """By the paper's ways, those that there are for this capacity; some may be alike."""
    nbytes = forward_bytes if is_forward else backward_bytes
    sizes = [nbytes(layer, samples) for layer in layers]
    seconds = [layer.forward + (0.0 if is_forward else layer.backward) for layer in layers]
    try:
        yield greedy(sizes, capacity)
        yield greedy_from_back(sizes, capacity)
        yield balanced(sizes, sizes, capacity)
        yield balanced(seconds, sizes, capacity)
    except Infeasible:
        return


def candidates(layers: Sequence[HostedLayer], gpus: HostedGpus, batch: int) -> Iterator[HarmonyPlan]:
    """All that the search tries: forward micro-batches are no smaller than backward ones."""
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    for backward_size in sizes:
        for packs in dict.fromkeys(packings(layers, backward_size, gpus.memory, is_forward=False)):
            before = packs[-1][0]  # layers that have a forward of their own
            reused = packs[:-1]
            for forward_size in (size for size in sizes if size >= backward_size):
                found: list[Packs] = [()]
                if before:
                    found = list(packings(layers[:before], forward_size, gpus.memory, is_forward=True))
                if all(sum(forward_bytes(layers[i], forward_size) for i in pack) < gpus.memory for pack in reused):
                    found.append(reused)
                for forward_packs in dict.fromkeys(found):
                    yield HarmonyPlan(
                        forward_size=forward_size,
                        forward_packs=forward_packs,
                        backward_size=backward_size,
                        backward_packs=packs,
                    )


def plan_harmony(layers: Sequence[HostedLayer], gpus: HostedGpus, batch: int) -> HarmonyOutcome:
    """The fastest candidate. Raises `Infeasible` if no pack of one layer fits, and `InvalidInput` if the model fits whole."""
    if sum(backward_bytes(layer, 1) for layer in layers) < gpus.memory:
        raise InvalidInput(
            "one pack has the whole model, so that it need not leave the GPU", hint="train on one GPU, or on copies of it"
        )
    found = [simulate_harmony(plan, layers, gpus, batch) for plan in candidates(layers, gpus, batch)]
    if not found:
        most = max(backward_bytes(layer, 1) for layer in layers)
        raise Infeasible(f"a layer takes {most} bytes for one sample, and a GPU has {gpus.memory}", smallest=most + 1)
    return min(found, key=lambda outcome: outcome.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    kind: str
    pack: tuple[int, ...]
    gpu: int
    size: int  # samples of a micro-batch

    def taken(self, layers: Sequence[HostedLayer]) -> int:
        """Bytes on its GPU."""
        nbytes = forward_bytes if self.kind == FORWARD else backward_bytes
        return sum(nbytes(layers[i], self.size) for i in self.pack)


def simulate_harmony(plan: HarmonyPlan, layers: Sequence[HostedLayer], gpus: HostedGpus, batch: int) -> HarmonyOutcome:
    """One step of a batch of so many samples."""
    covered = [i for pack in plan.backward_packs for i in pack]
    ahead = [i for pack in plan.forward_packs for i in pack]
    if covered != list(range(len(layers))) or ahead != covered[: len(ahead)] or len(ahead) != plan.backward_packs[-1][0]:
        raise InvalidInput(
            "the packs do not cover the layers in order", hint="the last backward pack has no forward of its own"
        )
    if batch % plan.forward_size or batch % plan.backward_size:
        raise InvalidInput(f"the micro-batches do not divide a batch of {batch}", hint="use sizes that do")
    tasks = [(FORWARD, pack, plan.forward_size) for pack in plan.forward_packs]
    tasks += [(BACKWARD, pack, plan.backward_size) for pack in reversed(plan.backward_packs)]
    step = _Step(layers, gpus, batch, {pack[0] for pack in plan.backward_packs[:-1]} - {0})
    for number, (kind, pack, size) in enumerate(tasks):
        step.do(_Task(kind=kind, pack=pack, gpu=number % gpus.count, size=size))
    return HarmonyOutcome(
        plan=plan,
        seconds=step.end,
        tasks=tuple(step.tasks),
        weights_in=step.weights_in,
        gradients_out=step.gradients_out,
        stashed=step.stashed,
    )


class _Step:
    """Plays tasks in order. The lanes of a GPU (computing, from the host, to the host, to other GPUs) serve in order too."""

    def __init__(self, layers: Sequence[HostedLayer], gpus: HostedGpus, batch: int, stashed: set[int]) -> None:
        self._layers, self._gpus, self._batch = layers, gpus, batch
        self._compute, self._in, self._out, self._peer = ([0.0] * gpus.count for _ in range(4))
        self._host = 0.0  # when the host has made all updates so far
        self._kept = stashed  # layers whose inputs go to the host
        self._stash = {0: [0.0] * batch}  # layer -> when its input is on the host, sample by sample
        self._before: dict[int, tuple[_Task, float, float]] = {}  # GPU -> its last task, when that began and ended
        self._last: _Task | None = None
        self._made = [0.0] * batch  # sample -> when the last task was through with it
        self.tasks: list[PackTask] = []
        self.weights_in = self.gradients_out = self.stashed = 0

    @property
    def end(self) -> float:
        return max([self._host, *self._out, *self._compute])

    def do(self, task: _Task) -> None:
        layers, gpu = [self._layers[i] for i in task.pack], task.gpu
        ready, arrived = self._weights(task), self._arrivals(task)
        stash = self._stash.get(task.pack[0]) if self._last is None or self._last.kind == task.kind == BACKWARD else None
        begun: list[float] = []
        for low in range(0, self._batch, task.size):
            samples = range(low, low + task.size)
            ready = max(ready, arrived[samples[-1]])
            if stash is not None:
                began = max(self._in[gpu], stash[samples[-1]])
                ready = self._in[gpu] = max(ready, began + task.size * layers[0].input / self._gpus.host)
            moment = max(ready, self._compute[gpu])
            begun.append(moment)
            for i, layer in zip(task.pack, layers, strict=True):
                moment += layer.launch + task.size * layer.forward
                if task.kind == FORWARD and i + 1 in self._kept:
                    self._stash_out(i + 1, samples, gpu, moment)
            if task.kind == BACKWARD:
                moment += sum(layer.launch + task.size * layer.backward for layer in layers)
            self._compute[gpu] = moment
            self._made[low : low + task.size] = [moment] * task.size
        self._last, self._before[gpu] = task, (task, begun[0], self._compute[gpu])
        self.tasks.append(PackTask(kind=task.kind, pack=task.pack, gpu=gpu, start=begun[0], end=self._compute[gpu]))
        if task.kind == BACKWARD:
            nbytes = sum(layer.weights for layer in layers)
            self.gradients_out += nbytes
            self._out[gpu] = max(self._out[gpu], self._compute[gpu]) + nbytes / self._gpus.host
            self._host = max(self._host, self._out[gpu]) + nbytes / self._gpus.update

    def _weights(self, task: _Task) -> float:
        """When they are there: they come while the task before computes, if there is room beside it, else after it. A forward
        that is followed by its own backward leaves them there."""
        before, first, end = self._before.get(task.gpu, (None, 0.0, 0.0))
        if before is not None and (before.kind, before.pack) == (FORWARD, task.pack):
            return end
        nbytes = sum(self._layers[i].weights for i in task.pack)
        self.weights_in += nbytes
        beside = before is None or before.taken(self._layers) + nbytes <= self._gpus.memory
        self._in[task.gpu] = max(self._in[task.gpu], first if beside else end) + nbytes / self._gpus.host
        return self._in[task.gpu]

    def _arrivals(self, task: _Task) -> list[float]:
        """Sample -> when what the last task made of it is on this task's GPU."""
        if self._last is None or self._last.gpu == task.gpu:
            return list(self._made)
        gpu = self._last.gpu
        border = task.pack[0] if self._last.kind == FORWARD else task.pack[-1] + 1  # activations; or gradients, as many bytes
        arrived = []
        for moment in self._made:
            self._peer[gpu] = max(self._peer[gpu], moment) + self._layers[border].input / self._gpus.peer
            arrived.append(self._peer[gpu])
        return arrived

    def _stash_out(self, layer: int, samples: range, gpu: int, moment: float) -> None:
        nbytes = len(samples) * self._layers[layer].input
        self.stashed += nbytes
        self._out[gpu] = max(self._out[gpu], moment) + nbytes / self._gpus.host
        there = self._stash.setdefault(layer, [0.0] * self._batch)
        there[samples[0] : samples[-1] + 1] = [self._out[gpu]] * len(samples)
