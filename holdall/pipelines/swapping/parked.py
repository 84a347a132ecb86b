"""Plays a pipeline whose stages send tensors away between forward and backward: to other GPUs, to the host, or nowhere, to be
computed again. Simulated; `mpress.py` plans by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from holdall.errors import InvalidInput
from holdall.pipelines.costs import PipeCosts
from holdall.pipelines.lowering import lower
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.simulator import POSTED, TaskSpan, _Play
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask

KEEP, PEER, HOST, RECOMPUTE = "keep", "peer", "host", "recompute"
TO_HOST = -1  # the host, among the GPUs that copies go to


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensor:
    """Something that a stage holds of a micro-batch from forward to backward."""

    nbytes: int
    again: float = inf  # seconds to compute it again


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedGpus:
    """GPUs of one server."""

    memory: int  # bytes of one
    peers: tuple[tuple[float, ...], ...]  # bytes per second from one to another; 0: no link
    host: float  # bytes per second between one and the host, each way


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChoice:
    way: str = KEEP
    stripes: tuple[tuple[int, int], ...] = ()  # (GPU, bytes) of each, for peers


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCopy:
    """A stripe on its way: out after a forward, or back before a backward."""

    stage: int
    batch: int
    tensor: int
    source: int  # GPU, or TO_HOST
    destination: int
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedStep:
    """A simulated step."""

    gpus: tuple[int, ...]  # stage -> its GPU
    choices: tuple[tuple[TensorChoice, ...], ...]  # stage -> its tensors'
    seconds: float
    peak: tuple[int, ...]  # GPU -> bytes
    spans: tuple[TaskSpan, ...]
    copies: tuple[TensorCopy, ...]

    def count(self, way: str) -> int:
        return sum(choice.way == way for own in self.choices for choice in own)


Tensors = Sequence[Sequence[StageTensor]]  # stage -> tensors
_lowered = lru_cache(maxsize=4)(lower)


def emulate(
    pipeline: Pipeline,
    costs: PipeCosts,
    tensors: Tensors,
    server: LinkedGpus,
    choices: Sequence[Sequence[TensorChoice]],
    gpus: Sequence[int] | None = None,
) -> ParkedStep:
    """One step with these choices. A tensor leaves as soon as its forward is over, and comes back while the task before its
    backward runs; links serve in order."""
    gpus = tuple(range(pipeline.ranks)) if gpus is None else tuple(gpus)
    _check(pipeline, costs, tensors, server)
    later = [
        sum(t.again for t, c in zip(own, of, strict=True) if c.way == RECOMPUTE)
        for own, of in zip(tensors, choices, strict=True)
    ]
    slower = tuple(replace(stage, input=stage.input + more) for stage, more in zip(costs.stages, later, strict=True))
    play = _SwapPlay(pipeline, [list(tasks) for tasks in _lowered(pipeline)], replace(costs, stages=slower), POSTED)
    play.prepare(tensors, server, choices, gpus)
    stuck = play.to_the_end()
    assert not stuck, stuck
    return ParkedStep(
        gpus=gpus,
        choices=tuple(map(tuple, choices)),
        seconds=max(span.end for span in play.spans),
        peak=_peaks(play, costs, tensors, choices, gpus),
        spans=tuple(play.spans),
        copies=tuple(play.copies),
    )


def _check(pipeline: Pipeline, costs: PipeCosts, tensors: Tensors, server: LinkedGpus) -> None:
    stages = pipeline.stages
    if pipeline.rank_of != tuple(range(stages)) or any(
        work.kind not in (FORWARD, BACKWARD) for own in pipeline.lists for work in own
    ):
        raise InvalidInput(
            f"`{pipeline.name}` has not one stage on each rank, with whole backwards", hint='use pipeline("1f1b", ...)'
        )
    if not len(costs.stages) == len(tensors) == len(server.peers) == stages:
        raise InvalidInput(
            f"{stages} stages, but costs of {len(costs.stages)}, tensors of {len(tensors)} and {len(server.peers)} GPUs",
            hint="one of each for every stage",
        )


@dataclass
class _SwapPlay(_Play):
    """The simulator of pipelines, with copies of tensors around its tasks."""

    copies: list[TensorCopy] = field(default_factory=list)
    lanes: dict[tuple[int, int], float] = field(default_factory=dict)  # (from, to) -> when the link is free
    begun: dict[int, float] = field(default_factory=dict)  # rank -> when its last computation began
    fetched: dict[tuple[int, int], float] = field(default_factory=dict)  # (stage, micro-batch) -> when all is back

    def prepare(
        self, tensors: Tensors, server: LinkedGpus, choices: Sequence[Sequence[TensorChoice]], gpus: Sequence[int]
    ) -> None:
        self.tensors, self.server, self.choices, self.gpus = tensors, server, choices, gpus

    def _do(self, rank: int, task: PipeTask) -> bool:
        is_backward = task.kind == BACKWARD
        if is_backward and (task.stage, task.batch) not in self.fetched:
            self._fetch(task, self.begun[rank])
        if is_backward:
            self.clock[rank] = max(self.clock[rank], self.fetched[task.stage, task.batch])
        if not super()._do(rank, task):
            return False
        if not task.is_message:
            self.begun[rank] = self.spans[-1].start
            if task.kind == FORWARD:
                self._send_away(task, self.spans[-1].end)
        return True

    def _send_away(self, task: PipeTask, moment: float) -> None:
        own = self.gpus[task.stage]
        for number, place, nbytes in self._stripes(task.stage):
            self._copy(task, number, own, place, nbytes, moment)

    def _fetch(self, task: PipeTask, moment: float) -> None:
        out = {(c.tensor, c.destination): c.end for c in self.copies if (c.stage, c.batch) == (task.stage, task.batch)}
        own, back = self.gpus[task.stage], moment
        for number, place, nbytes in self._stripes(task.stage):
            back = max(back, self._copy(task, number, place, own, nbytes, max(moment, out[number, place])))
        self.fetched[task.stage, task.batch] = back if out else 0.0

    def _stripes(self, stage: int) -> list[tuple[int, int, int]]:
        """(tensor, where it goes, bytes) of all that leaves."""
        found = []
        for number, (tensor, choice) in enumerate(zip(self.tensors[stage], self.choices[stage], strict=True)):
            if choice.way == HOST:
                found.append((number, TO_HOST, tensor.nbytes))
            elif choice.way == PEER:
                found += [(number, gpu, nbytes) for gpu, nbytes in choice.stripes]
        return found

    def _copy(self, task: PipeTask, number: int, source: int, destination: int, nbytes: int, moment: float) -> float:
        rate = self.server.host if TO_HOST in (source, destination) else self.server.peers[source][destination]
        start = max(moment, self.lanes.get((source, destination), 0.0))
        end = self.lanes[source, destination] = start + nbytes / rate
        self.copies.append(
            TensorCopy(
                stage=task.stage,
                batch=task.batch,
                tensor=number,
                source=source,
                destination=destination,
                nbytes=nbytes,
                start=start,
                end=end,
            )
        )
        return end


def _peaks(
    play: _SwapPlay, costs: PipeCosts, tensors: Tensors, choices: Sequence[Sequence[TensorChoice]], gpus: Sequence[int]
) -> tuple[int, ...]:
    """GPU -> its most bytes. Where something ends as another begins, it is freed first."""
    events: list[list[tuple[float, int]]] = [[] for _ in gpus]

    def hold(gpu: int, nbytes: int, start: float, end: float) -> None:
        if gpu != TO_HOST:
            events[gpu] += [(start, nbytes), (end, -nbytes)]

    spans = {(span.task.stage, span.task.kind, span.task.batch): span for span in play.spans}
    for (stage, kind, batch), span in spans.items():
        if kind != FORWARD:
            continue
        until = spans[stage, BACKWARD, batch]
        for tensor, choice in zip(tensors[stage], choices[stage], strict=True):
            if choice.way == KEEP:
                hold(gpus[stage], tensor.nbytes, span.start, until.end)
            elif choice.way == RECOMPUTE:
                hold(gpus[stage], tensor.nbytes, span.start, span.end)
                hold(gpus[stage], tensor.nbytes, until.start, until.end)
    back = {(c.stage, c.batch, c.tensor, c.source): c for c in play.copies if c.destination == gpus[c.stage]}
    for copy in play.copies:
        key = copy.stage, copy.batch, copy.tensor, copy.destination
        if key not in back or copy.source != gpus[copy.stage]:
            continue
        own = gpus[copy.stage]
        hold(own, copy.nbytes, spans[copy.stage, FORWARD, copy.batch].start, copy.end)
        hold(copy.destination, copy.nbytes, copy.start, back[key].end)
        hold(own, copy.nbytes, back[key].start, spans[copy.stage, BACKWARD, copy.batch].end)
    peaks = []
    for gpu, own_events in enumerate(events):
        held = most = costs.stages[gpus.index(gpu)].weights
        for _, change in sorted(own_events):
            held += change
            most = max(most, held)
        peaks.append(most)
    return tuple(peaks)
