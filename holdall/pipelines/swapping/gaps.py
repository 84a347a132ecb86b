"""Plays a pipeline whose micro-batches leave for the host in part between their forward and their backward, as in Yuan et al.
(USENIX ATC 2024). Simulated; `yuan.py` plans by it.

    forward    its bytes leave from its end on, and the rank's next forward (in the end, its next backward) waits for them
               before it sends: a copy out has the time of a forward while the pipeline fills, later that of a backward too
    backward   its bytes come back from the start of the rank's backward before it on, into one of two buffers in turn
    neither    a micro-batch whose backward is the rank's next task stays

A rank has one copy each way at a time, both ways at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from holdall.errors import InvalidInput
from holdall.pipelines.costs import PipeCosts
from holdall.pipelines.lowering import lower
from holdall.pipelines.pipeline import ONE, Pipeline
from holdall.pipelines.simulator import POSTED, TaskSpan, _Play
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCopy:
    """The bytes of a micro-batch on their way to the host, or back."""

    rank: int
    stage: int
    batch: int
    is_out: bool
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GapStep:
    """A simulated step."""

    seconds: float
    peak: tuple[int, ...]  # rank -> bytes of weights and activations
    spans: tuple[TaskSpan, ...]  # computations, without what they wait for
    copies: tuple[GapCopy, ...]


def play_gaps(pipeline: Pipeline, costs: PipeCosts, leaving: Sequence[int], host: float) -> GapStep:
    """One step. `leaving`: stage -> bytes of a micro-batch's activations that leave; `host`: bytes per second each way."""
    _check(pipeline, costs, leaving, host)
    play = _GapPlay(pipeline, [list(tasks) for tasks in _lowered(pipeline)], costs, POSTED)
    play.prepare(leaving, host)
    stuck = play.to_the_end()
    assert not stuck, stuck
    seconds = max(*play.clock, max((copy.end for copy in play.copies), default=0.0))
    return GapStep(seconds=seconds, peak=_peaks(play), spans=tuple(play.spans), copies=tuple(play.copies))


_lowered = lru_cache(maxsize=4)(lower)


def staying(pipeline: Pipeline) -> frozenset[tuple[int, int]]:
    """(stage, micro-batch) whose backward is the next task of its rank after its forward: nothing of them leaves."""
    found = set()
    for tasks in pipeline.lists:
        for task, after in pairwise(tasks):
            if task.kind == FORWARD and (after.stage, after.kind, after.batch) == (task.stage, BACKWARD, task.batch):
                found.add((task.stage, task.batch))
    return frozenset(found)


def _check(pipeline: Pipeline, costs: PipeCosts, leaving: Sequence[int], host: float) -> None:
    if (
        pipeline.weights != ONE
        or pipeline.copies > 1
        or any(t.kind not in (FORWARD, BACKWARD) for o in pipeline.lists for t in o)
    ):
        raise InvalidInput(
            f"`{pipeline.name}` has other tasks than forwards and whole backwards of one copy of the model",
            hint='use pipeline("interleaved", ...) or pipeline("1f1b", ...)',
        )
    if not len(costs.stages) == len(leaving) == pipeline.stages:
        raise InvalidInput(
            f"{pipeline.stages} stages, but costs of {len(costs.stages)} and leaving bytes of {len(leaving)}",
            hint="one of each for every stage",
        )
    wrong = [s for s, nbytes in enumerate(leaving) if not 0 <= nbytes <= costs.stages[s].activations]
    if wrong or host <= 0:
        what = (
            f"{leaving[wrong[0]]} of the {costs.stages[wrong[0]].activations} bytes of stage {wrong[0]}" if wrong else "bytes"
        )
        raise InvalidInput(f"{what} cannot leave over a link of {host} bytes per second", hint="use what there is, and a link")


@dataclass
class _GapPlay(_Play):
    """The simulator of pipelines, with copies beside its tasks."""

    copies: list[GapCopy] = field(default_factory=list)
    out: dict[tuple[int, int], GapCopy] = field(default_factory=dict)  # (stage, micro-batch) that has left
    back: dict[tuple[int, int], GapCopy] = field(default_factory=dict)
    lanes: dict[tuple[int, bool], float] = field(default_factory=dict)  # (rank, out?) -> when the link is free
    joins: dict[int, float] = field(default_factory=dict)  # rank -> the end of a copy that its next forward waits for
    begun: dict[int, TaskSpan] = field(default_factory=dict)  # rank -> its last task
    backward: dict[int, TaskSpan] = field(default_factory=dict)  # rank -> its last backward

    def prepare(self, leaving: Sequence[int], host: float) -> None:
        self.leaving, self.host, self.stay = leaving, host, staying(self.pipeline)
        self.last = {
            rank: max(n for n, task in enumerate(tasks) if task.kind == FORWARD) for rank, tasks in enumerate(self.lists)
        }

    def _do(self, rank: int, task: PipeTask) -> bool:
        key = task.stage, task.batch
        if task.kind == BACKWARD and key in self.out:
            if key not in self.back:
                before = self.backward.get(rank, self.begun[rank])
                self.back[key] = self._copy(rank, key, max(before.start, self.out[key].end), is_out=False)
            self.clock[rank] = max(self.clock[rank], self.back[key].end)
        if not super()._do(rank, task):
            return False
        if task.is_message:
            return True
        span = self.spans[-1]
        if task.kind == FORWARD or self.at[rank] > self.last[rank]:
            end = self.clock[rank] = max(span.end, self.joins.pop(rank, 0.0))
            self.ends[task.stage, task.kind, task.batch] = end
        self.begun[rank] = span
        if task.kind == BACKWARD:
            self.backward[rank] = span
        elif self.leaving[task.stage] and key not in self.stay:
            self.out[key] = self._copy(rank, key, span.end, is_out=True)
            self.joins[rank] = self.out[key].end
        return True

    def _copy(self, rank: int, key: tuple[int, int], moment: float, *, is_out: bool) -> GapCopy:
        start = max(moment, self.lanes.get((rank, is_out), 0.0))
        end = self.lanes[rank, is_out] = start + self.leaving[key[0]] / self.host
        self.copies.append(GapCopy(rank=rank, stage=key[0], batch=key[1], is_out=is_out, start=start, end=end))
        return self.copies[-1]


def _peaks(play: _GapPlay) -> tuple[int, ...]:
    """Rank -> its most bytes. Where something ends as another begins, it is freed first."""
    pipeline, stages = play.pipeline, play.costs.stages
    events: list[list[tuple[float, int]]] = [[] for _ in range(pipeline.ranks)]
    spans = {(span.task.stage, span.task.kind, span.task.batch): span for span in play.spans}
    for (stage, kind, batch), span in spans.items():
        if kind != FORWARD:
            continue
        own, until, found = stages[stage], spans[stage, BACKWARD, batch], events[span.rank]
        found += [(span.start, own.activations), (until.end, -own.activations)]
        for during, most in ((span, own.in_forward), (until, own.in_backward)):
            more = max(0, (most or 0) - own.activations)
            found += [(during.start, more), (during.end, -more)]
        if (stage, batch) in play.out:
            nbytes = play.leaving[stage]
            found += [(play.out[stage, batch].end, -nbytes), (play.back[stage, batch].start, nbytes)]
    peaks = []
    for rank, changes in enumerate(events):
        held = most = sum(stages[stage].weights for stage in pipeline.stages_of(rank))
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
        peaks.append(most)
    return tuple(peaks)
