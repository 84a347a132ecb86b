"""Seconds and bytes of the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.tasks import BACKWARD, FORWARD, INPUT, UPDATE, WEIGHT, PipeTask
from holdall.types.mesh import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Of one stage and one micro-batch. A whole backward takes `input` + `weight` seconds."""

    forward: float = 1.0
    input: float = 1.0  # seconds of the gradients of inputs
    weight: float = 1.0  # seconds of the gradients of weights
    update: float = 0.0
    activations: int = 0  # bytes held from forward to the end of backward
    for_weight: int | None = None  # those of them that are held from `I` to `W`; None: all
    in_forward: int | None = None  # bytes held at most while the forward runs; None: `activations`
    in_backward: int | None = None  # while a whole backward does, as where layers are computed again; None: `activations`
    in_input: int | None = None  # while `I` does; None: `activations`
    in_weight: int | None = None  # while `W` does; None: `for_weight`
    sent: int = 0  # bytes of the output; its gradient has as many
    weights: int = 0  # bytes of one version of the weights

    @property
    def backward(self) -> float:
        return self.input + self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeCosts:
    """Of all stages of a chain, in order, and of the messages between them."""

    stages: tuple[StageCosts, ...]
    hop: float = 0.0  # seconds of any message, besides those of its bytes
    network: Network | None = None  # what joins the ranks; None: messages take `hop` only
    hidden: float = 0.0  # share of the shorter of an overlapped forward and backward that costs no time

    @staticmethod
    def even(stages: int, *, hop: float = 0.0, hidden: float = 0.0, network: Network | None = None, **each: float) -> PipeCosts:
        """Equal stages; `each`: the fields of `StageCosts`."""
        one = StageCosts(**each)  # type: ignore[arg-type]
        return PipeCosts(stages=(one,) * stages, hop=hop, hidden=hidden, network=network)

    @staticmethod
    def shared_out(pipeline: Pipeline, rank: StageCosts, *, hop: float = 0.0, network: Network | None = None) -> PipeCosts:
        """A pipeline whose ranks all do the work of `rank` per micro-batch, in equal stages; messages are not divided."""
        parts = max(1, pipeline.chain // pipeline.ranks)
        part = StageCosts(
            forward=rank.forward / parts,
            input=rank.input / parts,
            weight=rank.weight / parts,
            update=rank.update / parts,
            activations=rank.activations // parts,
            for_weight=None if rank.for_weight is None else rank.for_weight // parts,
            sent=rank.sent,
            weights=rank.weights // parts,
        )
        return PipeCosts(stages=(part,) * pipeline.chain, hop=hop, network=network)

    def of(self, pipeline: Pipeline, stage: int) -> StageCosts:
        return self.stages[stage % pipeline.chain]

    def seconds(self, pipeline: Pipeline, task: PipeTask) -> float:
        """How long a rank computes at a task."""
        each = sorted(self._work(pipeline, work) for work in task.works)
        return each[0] if len(each) == 1 else sum(each) - self.hidden * each[0]

    def _work(self, pipeline: Pipeline, work: PipeTask) -> float:
        costs = self.of(pipeline, work.stage)
        return {
            FORWARD: costs.forward,
            BACKWARD: costs.backward,
            INPUT: costs.input,
            WEIGHT: costs.weight,
            UPDATE: costs.update,
        }[work.kind]

    def transfer(self, nbytes: int) -> float:
        """Seconds of a message."""
        return self.hop + (self.network.latency + nbytes / self.network.rate if self.network else 0.0)
