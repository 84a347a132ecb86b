"""The lists of DualPipe: two streams of micro-batches cross on every rank, forwards of one overlap backwards of the other.

Eight phases; `near` counts from the outer ranks inwards.

    1  F0                      5  B1, F1 with B0
    2  F0, F1                  6  B1, B0; the second half of them as I, with W for later
    3  I1, W1, F1              7  W, I0
    4  F0 with B1, F1 with B0  8  W
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdall.pipelines.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, PipeTask, overlapped


def crossing(near: int, half: int, streams: Sequence[Sequence[int]], stages: tuple[int, int]) -> list[PipeTask]:
    """The list of a rank: `half` ranks from the outside to the middle, micro-batches and stage of each of its two streams."""
    tasks: list[PipeTask] = []
    forwards, backwards = ([deque(stream) for stream in streams] for _ in range(2))
    later: deque[PipeTask] = deque()
    far = half - near - 1

    def forward(stream: int) -> PipeTask:
        return PipeTask(stages[stream], FORWARD, forwards[stream].popleft())

    def backward(stream: int, *, halves: bool = False) -> PipeTask:
        batch = backwards[stream].popleft()
        if halves:
            later.append(PipeTask(stages[stream], WEIGHT, batch))
        return PipeTask(stages[stream], INPUT if halves else BACKWARD, batch)

    tasks += [forward(0) for _ in range(2 * far)]
    for _ in range(near + 1):
        tasks += [forward(0), forward(1)]
    for _ in range(far):
        tasks += [backward(1, halves=True), later.popleft(), forward(1)]
    for i in range(len(streams[0]) - 2 * half + near + 1):
        first = forward(0), backward(1)
        tasks += list(first) if i == 0 and far == 0 else [overlapped(*first)]
        tasks.append(overlapped(forward(1), backward(0)))
    for _ in range(far):
        tasks.append(backward(1))
        tasks.append(overlapped(forward(1), backward(0)))
    halves = False
    for i in range(near + 1):
        halves |= i == (near + 1) // 2 and near % 2 == 1
        tasks.append(backward(1, halves=halves))
        halves |= i == (near + 1) // 2 and near % 2 == 0
        tasks.append(backward(0, halves=halves))
    for _ in range(far):
        tasks += [later.popleft(), backward(0, halves=True)]
    return tasks + list(later)
