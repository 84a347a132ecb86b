"""Mobius (ASPLOS 2023): a pipeline of more stages than GPUs, whose stages rest in host memory. Simulated.

Stages go round the GPUs. A GPU computes all micro-batches of a stage and then those of its next one, whose weights come while
the stage before computes, as far as there is room and time, and the rest after it. In backward, a stage's forward is computed
again; the last stage of every GPU is still there. This is the order of the schedule `breadth_first`, which runs.

`plan_mobius` cuts the layers. The paper solves a mixed integer program; its times are simulated here (loading as early as
possible is best for any cut), and cuts are tried: all of them for few layers, else those that are balanced. `cross_map` puts
stages that follow one another under different roots of the host's bus, where transfers do not share a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.cuts.balanced import even_cut
from holdall.pipelines.lowering import lower
from holdall.pipelines.pipeline import Pipeline, in_rounds, make
from holdall.pipelines.simulator import POSTED, TaskSpan, _Play
from holdall.pipelines.swapping.hosted import HostedGpus, HostedLayer, backward_bytes, forward_bytes
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask
from holdall.types.mesh import Network

FEW = 9  # layers of which all cuts are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class MobiusOutcome:
    """A simulated step."""

    bounds: tuple[int, ...]  # of the stages: (0, 3, 8) are layers 0 to 2 and 3 to 7
    seconds: float  # to the end of the last backward
    spans: tuple[TaskSpan, ...]
    weights_in: int  # bytes of weights from the host to all GPUs
    gradients_out: int
    exchanged: int  # bytes of activations and their gradients between stages
    is_best: bool = False  # of all cuts

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1


def rounds(gpus: int, stages: int, micro_batches: int) -> Pipeline:
    """What every GPU computes: its stages in order, each for all micro-batches, and back."""
    lists = []
    for gpu in range(gpus):
        own = range(gpu, stages, gpus)
        ahead = [PipeTask(s, FORWARD, m) for s in own for m in range(micro_batches)]
        back = [PipeTask(s, BACKWARD, m) for s in reversed(own) for m in reversed(range(micro_batches))]
        lists.append(ahead + back)
    return make("mobius", lists, in_rounds(gpus, stages), micro_batches)


def simulate_mobius(
    layers: Sequence[HostedLayer], bounds: Sequence[int], gpus: HostedGpus, *, samples: int, micro_batches: int
) -> MobiusOutcome:
    """One step of so many micro-batches of so many samples. Raises `Infeasible` if a stage alone is larger than a GPU."""
    stages = [layers[a:b] for a, b in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != len(layers) or not all(stages):
        raise InvalidInput(
            f"{list(bounds)} do not bound stages of {len(layers)} layers", hint="begin with 0, rise, and end there"
        )
    pipeline = rounds(gpus.count, len(stages), micro_batches)
    most = max(sum(backward_bytes(layer, samples) for layer in own) for own in stages)
    if most > gpus.memory:
        raise Infeasible(f"a stage takes {most} bytes, and a GPU has {gpus.memory}", hint="use more stages", smallest=most)
    costs = PipeCosts(
        stages=tuple(_costs(own, after, samples) for own, after in pairwise([*stages, []])), network=_network(gpus)
    )
    play = _HostedPlay(pipeline, [list(tasks) for tasks in lower(pipeline)], costs, POSTED)
    play.prepare(stages, gpus, samples)
    stuck = play.to_the_end()
    assert not stuck, stuck
    return MobiusOutcome(
        bounds=tuple(bounds),
        seconds=max(span.end for span in play.spans),
        spans=tuple(play.spans),
        weights_in=play.loaded,
        gradients_out=sum(layer.weights for layer in layers),
        exchanged=2 * micro_batches * sum(stage.sent for stage in costs.stages if gpus.count > 1),
    )


def _costs(own: Sequence[HostedLayer], after: Sequence[HostedLayer], samples: int) -> StageCosts:
    """Backward computes the forward again."""
    forward = sum(layer.launch + samples * layer.forward for layer in own)
    backward = sum(layer.launch + samples * layer.backward for layer in own)
    return StageCosts(forward=forward, input=forward, weight=backward, sent=samples * after[0].input if after else 0)


def _network(gpus: HostedGpus) -> Network | None:
    return None if gpus.peer == float("inf") else Network(name="between GPUs", rate=gpus.peer, latency=0.0)


@dataclass
class _HostedPlay(_Play):
    """The simulator of pipelines, with weights that come before the first micro-batch of a stage."""

    loaded: int = 0
    blocks: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank -> the stage that it computes, and the way
    spent: dict[int, tuple[float, float]] = field(default_factory=dict)  # rank -> when that began, and its last end

    def prepare(self, stages: Sequence[Sequence[HostedLayer]], gpus: HostedGpus, samples: int) -> None:
        self.gpus = gpus
        self.weights = [sum(layer.weights for layer in own) for own in stages]
        self.taken = {FORWARD: [sum(forward_bytes(layer, samples) for layer in own) for own in stages]}
        self.taken[BACKWARD] = [sum(backward_bytes(layer, samples) for layer in own) for own in stages]
        self.ready: dict[tuple[int, str], float] = {}  # (stage, way) -> when its weights have come

    def _do(self, rank: int, task: PipeTask) -> bool:
        if task.is_message:
            return super()._do(rank, task)
        block = task.stage, task.kind
        if block not in self.ready:
            self.ready[block] = self._load(rank, task.stage)
        self.clock[rank] = max(self.clock[rank], self.ready[block])
        if not super()._do(rank, task):
            return False
        span = self.spans[-1]
        began = self.spent[rank][0] if self.blocks.get(rank) == block else span.start
        self.blocks[rank], self.spent[rank] = block, (began, span.end)
        return True

    def _load(self, rank: int, stage: int) -> float:
        """When a stage's weights are there. As much as there is room and time for comes while the one before computes."""
        if rank not in self.blocks:
            self.loaded += self.weights[stage]
            return self.weights[stage] / self.gpus.host
        before, kind = self.blocks[rank]
        began, ended = self.spent[rank]
        if before == stage:
            return ended
        self.loaded += self.weights[stage]
        room = self.gpus.memory - self.taken[kind][before]
        early = min(self.weights[stage], room, self.gpus.host * (ended - began))
        return ended + (self.weights[stage] - early) / self.gpus.host


def plan_mobius(layers: Sequence[HostedLayer], gpus: HostedGpus, *, samples: int, micro_batches: int) -> MobiusOutcome:
    """The fastest cut into as many stages as there are GPUs, or more. Raises `Infeasible` if no layer fits alone."""
    if len(layers) < gpus.count:
        raise InvalidInput(f"{len(layers)} layers do not make a stage for each of {gpus.count} GPUs", hint="use fewer GPUs")
    best: MobiusOutcome | None = None
    smallest = None
    work = [2 * layer.launch + samples * (2 * layer.forward + layer.backward) for layer in layers]
    for bounds in sorted(cuts(layers, gpus.count), key=lambda bounds: _busiest(work, bounds, gpus.count)):
        if best is not None and micro_batches * _busiest(work, bounds, gpus.count) >= best.seconds:
            break  # no step is shorter than what its busiest GPU computes
        try:
            found = simulate_mobius(layers, bounds, gpus, samples=samples, micro_batches=micro_batches)
        except Infeasible as error:
            smallest = error.smallest if smallest is None or error.smallest is None else min(smallest, error.smallest)
            continue
        if best is None or found.seconds < best.seconds:
            best = found
    if best is None:
        raise Infeasible(f"no cut of {len(layers)} layers fits GPUs of {gpus.memory} bytes", smallest=smallest)
    return MobiusOutcome(
        bounds=best.bounds,
        seconds=best.seconds,
        spans=best.spans,
        weights_in=best.weights_in,
        gradients_out=best.gradients_out,
        exchanged=best.exchanged,
        is_best=len(layers) <= FEW,
    )


def cuts(layers: Sequence[HostedLayer], gpus: int) -> Iterator[tuple[int, ...]]:
    """Bounds of stages, as many as GPUs or more: all of few layers, else those with the most equal seconds, and bytes."""
    count = len(layers)
    for stages in range(gpus, count + 1):
        if count <= FEW:
            yield from ((0, *inner, count) for inner in combinations(range(1, count), stages - 1))
            continue
        by_time = even_cut([layer.launch + layer.forward + layer.backward for layer in layers], stages)
        yield from dict.fromkeys((by_time, even_cut([float(layer.weights + layer.inside) for layer in layers], stages)))


def _busiest(work: Sequence[float], bounds: Sequence[int], gpus: int) -> float:
    """Seconds that the busiest GPU computes for one micro-batch."""
    each = [sum(work[a:b]) for a, b in pairwise(bounds)]
    return max(sum(each[gpu::gpus]) for gpu in range(gpus))


def contention(stages: int, order: Sequence[int], roots: Sequence[int]) -> float:
    """How much transfers of stages that are near in time share a root: the sum of (GPUs under it) / (distance) over pairs of
    stages on different GPUs. `order`: the GPUs in their turn; `roots`: GPU -> its root."""
    on = [order[stage % len(order)] for stage in range(stages)]
    return sum(
        roots.count(roots[on[i]]) / (j - i)
        for i, j in combinations(range(stages), 2)
        if on[i] != on[j] and roots[on[i]] == roots[on[j]]
    )


def cross_map(stages: int, roots: Sequence[int]) -> tuple[int, ...]:
    """The order of the GPUs in the round with the least contention, by trying all."""
    return min(permutations(range(len(roots))), key=lambda order: contention(stages, order, roots))
