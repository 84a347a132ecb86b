"""ZB-V: two stages a rank, down the ranks and up again; no bubble inside for the activations of 1F1B's first rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.pipelines.pipeline import Pipeline, in_snake, make
from holdall.pipelines.tasks import FORWARD, INPUT, WEIGHT, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class ZbV:
    name: ClassVar[str] = "zb_v"
    paper: ClassVar[str] = "Zero Bubble Pipeline Parallelism, ICLR 2024; Pipeline Parallelism with Controllable Memory, 2024"
    is_exact: ClassVar[bool] = True

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        whole = max(micro_batches, 2 * ranks - 1)  # with fewer, some places of the lists stay empty
        lists = [[t for t in _of_rank(r, ranks, whole) if t.batch < micro_batches] for r in range(ranks)]
        return make(self.name, lists, in_snake(ranks, 2 * ranks), micro_batches)


def _of_rank(rank: int, ranks: int, micro_batches: int) -> list[PipeTask]:
    stages = (rank, 2 * ranks - 1 - rank)
    done = dict.fromkeys(((chunk, kind) for chunk in (0, 1) for kind in "FIW"), 0)
    tasks: list[PipeTask] = []

    def add(*which: tuple[int, str]) -> None:
        for chunk, kind in which:
            if done[chunk, kind] < micro_batches:
                tasks.append(PipeTask(stages[chunk], kind, done[chunk, kind]))
                done[chunk, kind] += 1

    for _ in range(2 * (ranks - rank) - 1):
        add((0, FORWARD))
    for _ in range(rank):
        add((1, FORWARD), (0, FORWARD))
    for _ in range(ranks - rank):
        add((1, FORWARD), (1, INPUT), (1, WEIGHT))
    while done[1, FORWARD] < micro_batches:
        add((0, FORWARD), (0, INPUT), (0, WEIGHT), (1, FORWARD), (1, INPUT), (1, WEIGHT))
    for _ in range(rank):
        add((0, INPUT), (1, INPUT))
    for _ in range(ranks - rank):
        add((0, INPUT), (0, WEIGHT))
    for chunk in (1, 0):
        for _ in range(micro_batches):
            add((chunk, WEIGHT))
    return tasks
