"""What every rank holds, task by task: activations from forward to the end of backward, and versions of weights.

Input buffers of messages are not counted apart: what a stage has received is among the activations of its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.pipelines.costs import PipeCosts
from holdall.pipelines.pipeline import DOUBLE, ONE, PREDICTED, STASHED, Pipeline
from holdall.pipelines.tasks import FORWARD, INPUT, LAST, UPDATE, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The most of each that a rank holds at once."""

    micro_batches: int  # of its stages together: a micro-batch on two stages counts twice
    versions: int  # of the weights of one stage
    bytes: int  # of activations and versions of weights together


def holdings(pipeline: Pipeline, lists: Sequence[Sequence[PipeTask]], costs: PipeCosts) -> tuple[Held, ...]:
    """Rank -> its peaks. They follow the order of its list alone."""
    return tuple(_of_rank(pipeline, rank, tasks, costs) for rank, tasks in enumerate(lists))


def _of_rank(pipeline: Pipeline, rank: int, tasks: Sequence[PipeTask], costs: PipeCosts) -> Held:
    stages = pipeline.stages_of(rank)
    versions = {stage: WeightVersions(pipeline) for stage in stages}
    activations, batches = 0, 0
    most, most_versions, peak = 0, 1, sum(costs.of(pipeline, s).weights for s in stages)

    def look(more: int = 0) -> None:
        nonlocal most, most_versions, peak
        weights = sum(versions[s].count * costs.of(pipeline, s).weights for s in stages)
        most, peak = max(most, batches), max(peak, activations + more + weights)
        most_versions = max(most_versions, *(versions[s].count for s in stages))

    for work in (work for task in tasks if not task.is_message for work in task.works):
        own = costs.of(pipeline, work.stage)
        all_of_it = own.activations
        kept = all_of_it if own.for_weight is None else own.for_weight
        if work.kind == FORWARD:
            activations, batches = activations + all_of_it, batches + 1
            versions[work.stage].forward(work.batch)
            look(max(0, (own.in_forward or 0) - all_of_it))
        elif work.kind == INPUT:
            look(max(0, (own.in_input or 0) - all_of_it))
            activations -= all_of_it - kept
            look()
        elif work.kind in LAST:
            is_whole = work.kind != LAST[1]
            look(max(0, (own.in_backward or 0) - all_of_it) if is_whole else max(0, (own.in_weight or 0) - kept))
            activations -= all_of_it if is_whole else kept
            batches -= 1
            versions[work.stage].backward(work.batch)
        elif work.kind == UPDATE:
            versions[work.stage].update()
            look()
    return Held(micro_batches=most, versions=most_versions, bytes=peak)


class WeightVersions:
    """The versions of one stage's weights that some micro-batch or the next update needs.

    stashed     a micro-batch keeps the version of its forward until its backward (PipeDream)
    double      all micro-batches of an update use the version before the newest one that they could have (2BW)
    predicted   the micro-batches of an update share one prediction, besides the weights themselves (XPipe)
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._rule, self._per_update = pipeline.weights, max(1, pipeline.per_update)
        self.newest = 0
        self.used: dict[int, int] = {}  # micro-batch under way -> its version
        self.predicted: set[int] = set()  # updates whose micro-batches have begun: their prediction stays until then

    def forward(self, batch: int) -> int:
        """The version that the micro-batch is computed with."""
        update = batch // self._per_update
        if self._rule == ONE:
            version = 0
        elif self._rule == DOUBLE:
            version = max(0, update - 1)
            assert version <= self.newest, "the version that this micro-batch needs is not there yet"
        elif self._rule == PREDICTED:
            version = update
            self.predicted.add(update)
        else:
            assert self._rule == STASHED
            version = self.newest
        self.used[batch] = version
        return version

    def backward(self, batch: int) -> None:
        del self.used[batch]

    def update(self) -> None:
        self.predicted.discard(self.newest)
        self.newest += 1

    def is_needed(self, version: int) -> bool:
        """Will a micro-batch, under way or to come, compute with this version?"""
        if self._rule == PREDICTED:
            return version in self.predicted
        return version in self.used.values() or version >= self.newest - (self._rule == DOUBLE)

    @property
    def count(self) -> int:
        if self._rule == PREDICTED:
            return 1 + len(self.predicted)
        return len({*self.used.values(), self.newest} if self._rule != ONE else {0})
