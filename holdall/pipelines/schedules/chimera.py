"""Chimera: two copies of the model, one down the ranks and one up, each with half of the micro-batches.

Stage s of the second copy is number D + s and lies on rank D - 1 - s. A unit has D micro-batches, in slots of one forward or
one backward: down, micro-batch m has its forward on rank w in slot 2m + w and its backward in slot 2m + 2D - 1 - w. Units
follow one another every 2D slots. Both copies' gradients are added at the end.

A backward takes about two forwards, which leaves gaps between units. `doubling` lets two micro-batches go forward together, so
that slots are equal again: the idle time no longer grows with the number of units, and a rank holds twice as much. Its lists
are made moment by moment, backwards first, with D/2 pairs under way in each direction; the paper draws them by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_snake, make, require
from holdall.pipelines.tasks import BACKWARD, FORWARD, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Chimera:
    name: ClassVar[str] = "chimera"
    paper: ClassVar[str] = "Chimera, SC 2021"
    is_exact: ClassVar[bool] = True

    doubling: bool = False

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        require(ranks % 2 == 0, self.name, f"an even number of ranks, not {ranks}", "use `hanayo`, or one rank more")
        unit = ranks * (2 if self.doubling else 1)
        require(
            micro_batches % unit == 0,
            self.name,
            f"micro-batches in units of {unit}, not {micro_batches}",
            f"use a multiple of {unit} micro-batches",
        )
        if self.doubling:
            lists = _doubled(ranks, micro_batches)
        else:
            lists = [[task for _, task in sorted(tasks)] for tasks in slots_of(ranks, micro_batches)]
        return make(self.name, lists, in_snake(ranks, 2 * ranks), micro_batches, chain=ranks)


def slots_of(ranks: int, micro_batches: int) -> list[list[tuple[int, PipeTask]]]:
    """Rank -> (slot, task); no two tasks of a rank have the same slot."""
    slots: list[list[tuple[int, PipeTask]]] = [[] for _ in range(ranks)]
    half = ranks // 2
    for unit in range(micro_batches // ranks):
        for up in (0, 1):
            for m in range(half):
                batch = unit * ranks + up * half + m
                for stage in range(ranks):
                    rank = ranks - 1 - stage if up else stage
                    first = 2 * ranks * unit + 2 * m
                    slots[rank].append((first + stage, PipeTask(up * ranks + stage, FORWARD, batch)))
                    slots[rank].append((first + 2 * ranks - 1 - stage, PipeTask(up * ranks + stage, BACKWARD, batch)))
    return slots


def _doubled(ranks: int, micro_batches: int) -> list[list[PipeTask]]:
    """Moment by moment; `F` of a pair and `B` of a micro-batch take one slot each. Pairs go down and up by turns."""
    lists: list[list[PipeTask]] = [[] for _ in range(ranks)]
    waiting: list[list[PipeTask]] = [[] for _ in range(ranks)]  # of a forward, `batch` is the number of its pair
    ready = {0: [PipeTask(pair % 2 * ranks, FORWARD, pair) for pair in range(micro_batches // 2)]}
    under_way, moment, left = [0, 0], 0, 3 * ranks * (micro_batches // 2)
    leaving: dict[int, list[int]] = {}  # moment -> directions in which a micro-batch is through

    while left:
        for up in leaving.pop(moment, ()):
            under_way[up] -= 1
        for task in ready.pop(moment, ()):
            waiting[_rank_of(task.stage, ranks)].append(task)
        for rank in range(ranks):
            able = [t for t in waiting[rank] if t.kind == BACKWARD or t.stage % ranks or under_way[t.stage // ranks] < ranks]
            if not able:
                continue
            task = min(able, key=lambda t: (t.kind == FORWARD, t.stage % ranks * (1 if t.kind == BACKWARD else -1), t.batch))
            waiting[rank].remove(task)
            left -= 1
            stage, up = task.stage, task.stage // ranks
            pair = [2 * task.batch, 2 * task.batch + 1]
            after: list[PipeTask] = []
            if task.kind == FORWARD:
                lists[rank] += [PipeTask(stage, FORWARD, m) for m in pair]
                under_way[up] += 2 if stage % ranks == 0 else 0
                is_last = stage % ranks == ranks - 1
                after = [PipeTask(stage, BACKWARD, m) for m in pair] if is_last else [PipeTask(stage + 1, FORWARD, task.batch)]
            else:
                lists[rank].append(task)
                if stage % ranks:
                    after = [PipeTask(stage - 1, BACKWARD, task.batch)]
                else:
                    leaving.setdefault(moment + 1, []).append(up)
            ready.setdefault(moment + 1, []).extend(after)
        moment += 1
    return lists


def _rank_of(stage: int, ranks: int) -> int:
    return stage if stage < ranks else 2 * ranks - 1 - stage
