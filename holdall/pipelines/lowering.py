"""Adds sends and receives to the lists of a pipeline.

A message is sent as soon as it is computed, and the other rank receives it at that moment of its own list: before whatever it
begins later. All ranks so have the messages in one order, which is why lowered lists end even if every send waits for its
receive. Moments are those of stages of equal costs (forward 1, each half of backward 1), without the time of messages.
"""

from __future__ import annotations

from heapq import heappop, heappush

from holdall.errors import InvalidInput
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.tasks import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INPUT,
    OVERLAP,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    UPDATE,
    WEIGHT,
    PipeTask,
)

_SECONDS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0, UPDATE: 0.0, OVERLAP: 3.0}
Lists = tuple[tuple[PipeTask, ...], ...]


def messages_of(pipeline: Pipeline, task: PipeTask) -> list[tuple[PipeTask, PipeTask]]:
    """(send, receive) of what a task computes for stages on other ranks."""
    found = []
    for work in task.works:
        to = None
        if work.kind == FORWARD:
            to, kinds = pipeline.after(work.stage), (SEND_F, RECV_F)
        elif work.kind in GRADIENTS:
            to, kinds = pipeline.before(work.stage), (SEND_B, RECV_B)
        if to is not None and pipeline.rank_of[to] != pipeline.rank_of[work.stage]:
            found.append((PipeTask(work.stage, kinds[0], work.batch), PipeTask(to, kinds[1], work.batch)))
    return found


def lower(pipeline: Pipeline) -> Lists:
    """The lists with sends and receives. Raises `InvalidInput` if tasks wait for one another in a circle."""
    lists: list[list[PipeTask]] = [[] for _ in pipeline.lists]
    at = [0] * pipeline.ranks
    clock = [0.0] * pipeline.ranks
    ends: dict[tuple[int, str, int], float] = {}
    queue: list[tuple[float, int, int, tuple[PipeTask, PipeTask]]] = []  # messages by the moment they are there

    def start_of(rank: int) -> float | None:
        """The moment at which a rank's next task can begin; None: not before another rank does something."""
        moment = clock[rank]
        task = pipeline.lists[rank][at[rank]]
        inside = {(w.stage, BACKWARD if w.kind == INPUT else w.kind, w.batch) for w in task.works}
        for work in task.works:
            for need in pipeline.needs(work) if work.kind != UPDATE else ():
                if need in inside:
                    continue
                if need not in ends:
                    return None
                moment = max(moment, ends[need])
        return moment

    while True:
        starts = [(moment, rank) for rank in range(pipeline.ranks) if at[rank] < len(pipeline.lists[rank])
                  for moment in [start_of(rank)] if moment is not None]  # fmt: skip
        moment, rank = min(starts, default=(float("inf"), -1))
        if queue and queue[0][0] <= moment:
            send, receive = heappop(queue)[3]
            lists[pipeline.rank_of[send.stage]].append(send)
            lists[pipeline.rank_of[receive.stage]].append(receive)
            continue
        if rank < 0:
            break
        task = pipeline.lists[rank][at[rank]]
        at[rank] += 1
        clock[rank] = moment + _SECONDS[task.kind]
        lists[rank].append(task)
        for work in task.works:
            ends[work.stage, BACKWARD if work.kind == INPUT else work.kind, work.batch] = clock[rank]
        for pair in messages_of(pipeline, task):
            heappush(queue, (clock[rank], rank, len(ends), pair))
    waiting = [f"rank {r} at `{pipeline.lists[r][at[r]]}`" for r in range(pipeline.ranks) if at[r] < len(pipeline.lists[r])]
    if waiting:
        raise InvalidInput(
            f"the lists of `{pipeline.name}` never end: {', '.join(waiting)} wait for one another",
            hint="let every task come after those that it needs",
        )
    return tuple(map(tuple, lists))
