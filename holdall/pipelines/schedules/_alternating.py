"""Lists that begin with some forwards and then alternate one backward and one forward."""

from __future__ import annotations

from holdall.pipelines.tasks import BACKWARD, FORWARD, UPDATE, PipeTask


def alternating(stage: int, first: int, micro_batches: int, *, per_update: int = 0) -> list[PipeTask]:
    """`first` forwards, then a backward and a forward by turns, then the backwards that are left.

    `per_update`: update the weights after so many backwards; 0: never, since the step ends with one.
    """
    ahead = min(first, micro_batches)
    tasks = [PipeTask(stage, FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches):
        tasks.append(PipeTask(stage, BACKWARD, m))
        if per_update and (m + 1) % per_update == 0:
            tasks.append(PipeTask(stage, UPDATE, m // per_update))
        if ahead + m < micro_batches:
            tasks.append(PipeTask(stage, FORWARD, ahead + m))
    return tasks
