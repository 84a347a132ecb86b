"""Hanayo: the stages go down the ranks and up again, `waves` times, so that each turn fills bubbles without a second copy.

The lists are made moment by moment: a free rank does a backward if one is ready, else the forward of its deepest stage that is
ready. P micro-batches are under way at most, so a rank holds `2 * waves * P` at most, over all its stages; `under_way` permits
more, which leaves fewer bubbles where there are more micro-batches than ranks. Stages have equal costs there, a backward two
forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_snake, make, require
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask

_SLOTS = {FORWARD: 1, BACKWARD: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hanayo:
    name: ClassVar[str] = "hanayo"
    paper: ClassVar[str] = "Hanayo, SC 2023"
    is_exact: ClassVar[bool] = True

    waves: int = 1
    under_way: int = 0  # micro-batches at once; 0: as many as ranks

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        require(self.waves >= 1, self.name, "at least one wave", "use hanayo:waves=2")
        stages = 2 * self.waves * ranks
        rank_of = in_snake(ranks, stages)
        return make(self.name, _greedy(ranks, stages, rank_of, micro_batches, self.under_way or ranks), rank_of, micro_batches)


def _greedy(ranks: int, stages: int, rank_of: tuple[int, ...], micro_batches: int, most: int) -> list[list[PipeTask]]:
    lists: list[list[PipeTask]] = [[] for _ in range(ranks)]
    ready: dict[int, list[tuple[int, PipeTask]]] = {  # moment -> tasks that can run from then on, with their rank
        0: [(rank_of[0], PipeTask(0, FORWARD, m)) for m in range(micro_batches)]
    }
    waiting: list[list[PipeTask]] = [[] for _ in range(ranks)]
    free, begun, moment = [0] * ranks, 0, 0
    over: list[int] = []  # moments at which micro-batches leave
    left = 2 * stages * micro_batches
    while left:
        for rank, task in ready.pop(moment, ()):
            waiting[rank].append(task)
        for rank in range(ranks):
            may_begin = begun - sum(end <= moment for end in over) < most
            able = [t for t in waiting[rank] if t.kind == BACKWARD or t.stage or may_begin]
            if free[rank] > moment or not able:
                continue
            task = min(able, key=lambda t: (t.kind == FORWARD, t.stage if t.kind == BACKWARD else -t.stage, t.batch))
            waiting[rank].remove(task)
            lists[rank].append(task)
            left -= 1
            free[rank] = end = moment + _SLOTS[task.kind]
            if task.stage == 0 and task.kind == FORWARD:
                begun += 1
            elif task.stage == 0:
                over.append(end)
            after = _after(task, stages)
            if after is not None:
                ready.setdefault(end, []).append((rank_of[after.stage], after))
        moment += 1
    return lists


def _after(task: PipeTask, stages: int) -> PipeTask | None:
    """What a task makes ready."""
    if task.kind == FORWARD and task.stage < stages - 1:
        return PipeTask(task.stage + 1, FORWARD, task.batch)
    stage = task.stage if task.kind == FORWARD else task.stage - 1
    return PipeTask(stage, BACKWARD, task.batch) if stage >= 0 else None
