"""Searches meshes for a transformer: data x pipeline x tensor ranks, a schedule and a micro-batch, by simulated step time.

Costs are closed forms of a decoder's shape (Megatron-LM, SC 2021 and MLSys 2023); pipelines are simulated. Candidates are taken
in the order of a lower bound of their time, so that most are never simulated and the answer is that of trying all of them.
Nothing here is measured.

    a layer, forward      24 s h^2 + 4 s^2 h operations a sequence, divided by the tensor ranks; backward twice as many
    tensor ranks          two all-reduces of 2 b s h bytes a layer in forward, two in backward
    activations           s b h (10 + 24/t + 5 a s/(h t)) bytes a layer
    model states          16 bytes a parameter, divided by tensor and pipeline ranks
    data ranks            one all-reduce of the gradients, 2 bytes a parameter, after the last backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdall.cost.collectives import collective_seconds
from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.schedules import pipeline
from holdall.pipelines.simulator import simulate
from holdall.types.mesh import MeshDim, Network

SCHEDULES = ("1f1b", "gpipe", "interleaved:chunks=2", "interleaved:chunks=4", "zb_h1", "zb_v")
_MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What is trained, and how many sequences a step has."""

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int

    @property
    def parameters(self) -> int:
        """Of all layers, without embeddings."""
        return 12 * self.layers * self.hidden**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices; `inside` joins those of a node, `between` the nodes."""

    devices: int
    per_node: int
    memory: int  # bytes of a device
    rate: float  # operations per second that a device reaches
    inside: Network
    between: Network


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    data: int
    pipes: int
    tensor: int
    schedule: str
    micro_batch: int  # sequences
    seconds: float = 0.0  # of a step, simulated
    peak: int = 0  # bytes of the fullest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAnswer:
    best: MeshPlan
    simulated: int  # candidates that were simulated
    candidates: int  # those that the sizes permit


def search_meshes(shape: DecoderShape, cluster: Cluster, *, schedules: Sequence[str] = SCHEDULES) -> MeshAnswer:
    """The fastest mesh whose fullest rank fits. Raises `Infeasible` if none does."""
    bounded = sorted(
        ((bound(shape, cluster, plan), i, plan) for i, plan in enumerate(candidates(shape, cluster, schedules))),
        key=lambda entry: entry[:2],
    )
    best: MeshPlan | None = None
    least, count = None, 0
    for lower, _, plan in bounded:
        if best is not None and lower >= best.seconds:
            break
        count += 1
        tried = evaluate(shape, cluster, plan)
        least = tried.peak if least is None else min(least, tried.peak)
        if tried.peak <= cluster.memory and (best is None or tried.seconds < best.seconds):
            best = tried
    if best is None:
        need = "" if least is None else f"; the smallest peak found is {least} bytes"
        raise Infeasible(f"no mesh of {cluster.devices} devices fits{need}", hint="use more devices, or more memory")
    return MeshAnswer(best=best, simulated=count, candidates=len(bounded))


def candidates(shape: DecoderShape, cluster: Cluster, schedules: Sequence[str]) -> Iterator[MeshPlan]:
    """All meshes, schedules and micro-batches that divide evenly; tensor ranks stay inside a node."""
    for tensor in _divisors(cluster.devices):
        if tensor > cluster.per_node or shape.heads % tensor:
            continue
        for pipes in _divisors(cluster.devices // tensor):
            data = cluster.devices // tensor // pipes
            for size in _MICRO_BATCHES:
                if shape.batch % (data * size):
                    continue
                for name in schedules if pipes > 1 else schedules[:1]:
                    plan = MeshPlan(data=data, pipes=pipes, tensor=tensor, schedule=name, micro_batch=size)
                    if _pipeline(shape, plan) is not None:
                        yield plan


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _pipeline(shape: DecoderShape, plan: MeshPlan) -> Pipeline | None:
    """None: the schedule is not defined for these sizes, or layers do not divide into its stages."""
    made = _made(plan.schedule, plan.pipes, shape.batch // (plan.data * plan.micro_batch))
    return made if made is not None and shape.layers % made.chain == 0 else None


@lru_cache(maxsize=256)
def _made(name: str, ranks: int, micro_batches: int) -> Pipeline | None:
    try:
        return pipeline(name, ranks=ranks, micro_batches=micro_batches)
    except InvalidInput:
        return None


def layer_seconds(shape: DecoderShape, cluster: Cluster, plan: MeshPlan) -> float:
    """Forward of one layer and micro-batch, with its all-reduces; backward has twice the computing and as many all-reduces."""
    return _compute(shape, cluster, plan) + _reduces(shape, cluster, plan)


def _compute(shape: DecoderShape, cluster: Cluster, plan: MeshPlan) -> float:
    operations = 24 * shape.seq * shape.hidden**2 + 4 * shape.seq**2 * shape.hidden
    return plan.micro_batch * operations / (cluster.rate * plan.tensor)


def _reduces(shape: DecoderShape, cluster: Cluster, plan: MeshPlan) -> float:
    if plan.tensor == 1:
        return 0.0
    nbytes = 2 * plan.micro_batch * shape.seq * shape.hidden
    return 2 * collective_seconds("all_reduce", nbytes, [MeshDim(name="tp", size=plan.tensor, network=cluster.inside)])


def data_seconds(shape: DecoderShape, cluster: Cluster, plan: MeshPlan) -> float:
    """The all-reduce of a rank's gradients over the data ranks."""
    if plan.data == 1:
        return 0.0
    nbytes = 2 * shape.parameters // (plan.tensor * plan.pipes)
    network = cluster.inside if cluster.devices <= cluster.per_node else cluster.between
    return collective_seconds("all_reduce", nbytes, [MeshDim(name="dp", size=plan.data, network=network)])


def bound(shape: DecoderShape, cluster: Cluster, plan: MeshPlan) -> float:
    """No step is shorter: all micro-batches on one rank, the all-reduce of gradients, and, if there is one copy of the model,
    the first micro-batch's way to the last rank.
    """
    made = _pipeline(shape, plan)
    assert made is not None
    per_layer = 3 * _compute(shape, cluster, plan) + 2 * _reduces(shape, cluster, plan)
    way = (plan.pipes - 1) * shape.layers / made.chain * layer_seconds(shape, cluster, plan) if made.copies == 1 else 0.0
    return way + made.micro_batches * shape.layers / plan.pipes * per_layer + data_seconds(shape, cluster, plan)


def evaluate(shape: DecoderShape, cluster: Cluster, plan: MeshPlan) -> MeshPlan:
    """The plan with its simulated seconds and peak."""
    made = _pipeline(shape, plan)
    assert made is not None
    layers = shape.layers // made.chain
    forward = layers * layer_seconds(shape, cluster, plan)
    backward = layers * (2 * _compute(shape, cluster, plan) + _reduces(shape, cluster, plan))
    s, h, b, t, a = shape.seq, shape.hidden, plan.micro_batch, plan.tensor, shape.heads
    activations = layers * s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    stage = StageCosts(
        forward=forward,
        input=backward - layers * _compute(shape, cluster, plan),
        weight=layers * _compute(shape, cluster, plan),
        activations=int(activations),
        sent=2 * b * s * h,
        weights=16 * shape.parameters // (made.chain * t),
    )
    network = cluster.inside if cluster.devices <= cluster.per_node else cluster.between
    found = simulate(made, PipeCosts(stages=(stage,) * made.chain, network=network))
    return MeshPlan(
        data=plan.data,
        pipes=plan.pipes,
        tensor=plan.tensor,
        schedule=plan.schedule,
        micro_batch=plan.micro_batch,
        seconds=found.makespan + data_seconds(shape, cluster, plan),
        peak=max(found.peak),
    )
