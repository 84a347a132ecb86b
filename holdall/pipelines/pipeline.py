"""A pipeline: what every rank computes, in order; which stage lies on which rank; and what stages follow one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from holdall.errors import InvalidInput
from holdall.pipelines.tasks import BACKWARD, FORWARD, INPUT, UPDATE, WEIGHT, PipeTask

ONE, STASHED, DOUBLE, PREDICTED = "one", "stashed", "double", "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Lists of computations, one for each rank. Sends and receives are added by `lower`."""

    name: str
    lists: tuple[tuple[PipeTask, ...], ...]  # rank -> its computations in order
    rank_of: tuple[int, ...]  # stage -> its rank
    micro_batches: int
    chain: int  # stages that follow one another; more than one chain: copies of the model, as in Chimera
    weights: str = ONE  # which weights a micro-batch is computed with; one: the same for all, and an update at the end
    per_update: int = 0  # micro-batches of an update, in pipelines that never flush

    @property
    def ranks(self) -> int:
        return len(self.lists)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def copies(self) -> int:
        """Copies of the model's weights in the whole pipeline."""
        return self.stages // self.chain

    def before(self, stage: int) -> int | None:
        return None if stage % self.chain == 0 else stage - 1

    def after(self, stage: int) -> int | None:
        return None if stage % self.chain == self.chain - 1 else stage + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, home in enumerate(self.rank_of) if home == rank)

    def batches_of(self, stage: int) -> tuple[int, ...]:
        """The micro-batches that a stage computes, in the order of their forwards."""
        return tuple(work.batch for work in self._works(stage) if work.kind == FORWARD)

    def summed(self, stage: int) -> tuple[int, ...]:
        """The micro-batches of a stage in the order in which their weight gradients are added."""
        return tuple(work.batch for work in self._works(stage) if work.kind in (BACKWARD, WEIGHT))

    def _works(self, stage: int) -> Iterable[PipeTask]:
        for task in self.lists[self.rank_of[stage]]:
            yield from (work for work in task.works if work.stage == stage)

    def needs(self, task: PipeTask) -> tuple[tuple[int, str, int], ...]:
        """(stage, kind, micro-batch) that must be computed first; kind `B` stands for `I` too."""
        stage, kind, batch = task.stage, task.kind, task.batch
        if kind == FORWARD:
            before = self.before(stage)
            return () if before is None else ((before, FORWARD, batch),)
        if kind in (BACKWARD, INPUT):
            after = self.after(stage)
            own = ((stage, FORWARD, batch),)
            return own if after is None else (*own, (after, BACKWARD, batch))
        return ((stage, BACKWARD, batch),)


class PipeSchedule(Protocol):
    """A member of `pipelines/schedules`: a published order of work."""

    name: ClassVar[str]
    paper: ClassVar[str]
    is_exact: ClassVar[bool]  # gradients and updates are those of plain training with the same micro-batches

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline: ...


def check_lists(pipeline: Pipeline) -> None:
    """Refuse lists in which something is missing, done twice, or done on the wrong rank; whether they end is `simulate`'s."""
    found: Counter[tuple[int, str, int]] = Counter()
    for rank, tasks in enumerate(pipeline.lists):
        for work in (work for task in tasks for work in task.works):
            if not 0 <= work.stage < pipeline.stages or pipeline.rank_of[work.stage] != rank:
                raise _wrong(pipeline, f"`{work}` is on rank {rank}, which does not have that stage")
            found[work.stage, work.kind, work.batch] += 1
    twice = [PipeTask(*key) for key, count in found.items() if count > 1]
    if twice:
        raise _wrong(pipeline, f"`{twice[0]}` is there twice")
    for stage in range(pipeline.stages):
        own = [batch for s, kind, batch in found if s == stage and kind == FORWARD]
        for batch in own:
            whole = (stage, BACKWARD, batch) in found
            halves = ((stage, INPUT, batch) in found) + ((stage, WEIGHT, batch) in found)
            if (whole, halves) not in ((True, 0), (False, 2)):
                raise _wrong(pipeline, f"`{stage}F{batch}` has no backward, or more than one")
        backwards = {batch for s, kind, batch in found if s == stage and kind not in (FORWARD, UPDATE)}
        if backwards - set(own):
            raise _wrong(pipeline, f"stage {stage} has a backward of micro-batch {min(backwards - set(own))} but no forward")
        first = stage - stage % pipeline.chain
        if set(own) != {batch for s, kind, batch in found if s == first and kind == FORWARD}:
            raise _wrong(pipeline, f"stage {stage} computes other micro-batches than stage {first}")
    done = {batch for _, kind, batch in found if kind == FORWARD}
    if done != set(range(pipeline.micro_batches)):
        raise _wrong(pipeline, f"{len(done)} micro-batches are computed, not 0 to {pipeline.micro_batches - 1}")


def _wrong(pipeline: Pipeline, what: str) -> InvalidInput:
    return InvalidInput(f"the lists of `{pipeline.name}` are wrong: {what}", hint="every stage does every micro-batch once")


def make(
    name: str,
    lists: Sequence[Sequence[PipeTask]],
    rank_of: Sequence[int],
    micro_batches: int,
    *,
    chain: int | None = None,
    weights: str = ONE,
    per_update: int = 0,
) -> Pipeline:
    """A checked pipeline; `chain`: all stages follow one another unless it says otherwise."""
    made = Pipeline(
        name=name,
        lists=tuple(map(tuple, lists)),
        rank_of=tuple(rank_of),
        micro_batches=micro_batches,
        chain=chain or len(rank_of),
        weights=weights,
        per_update=per_update,
    )
    check_lists(made)
    return made


def in_snake(ranks: int, stages: int) -> tuple[int, ...]:
    """Stages back and forth over the ranks: 0 1 2 2 1 0 0 1 2 and so on."""
    return tuple(s % ranks if s // ranks % 2 == 0 else ranks - 1 - s % ranks for s in range(stages))


def in_rounds(ranks: int, stages: int) -> tuple[int, ...]:
    """Stages around the ranks: 0 1 2 0 1 2 and so on."""
    return tuple(s % ranks for s in range(stages))


def require(holds: bool, name: str, rule: str, hint: str) -> None:
    """Refuse sizes that a schedule is not defined for."""
    if not holds:
        raise InvalidInput(f"the schedule `{name}` needs {rule}", hint=hint)
