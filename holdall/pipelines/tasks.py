"""What ranks of a pipeline do, in the notation of torch's pipelines: `2F0` is the forward of micro-batch 0 on stage 2.

F        forward                        SEND_F, RECV_F   activations to, from a neighbouring stage
B        backward, whole                SEND_B, RECV_B   gradients, the other way
I, W     backward in two parts: gradients of inputs, which the stage before waits for, and of weights, which can wait
U        update of the stage's weights, in pipelines that never flush
(0F4;3B1)OVERLAP_F_B   a forward and a backward of two stages of one rank, overlapped by a kernel that does both
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdall.errors import InvalidInput

FORWARD, BACKWARD, INPUT, WEIGHT, UPDATE, OVERLAP = "F", "B", "I", "W", "U", "OVERLAP_F_B"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
SENDS, RECEIVES = (SEND_F, SEND_B), (RECV_F, RECV_B)
GRADIENTS = (BACKWARD, INPUT)  # the kinds after which a stage sends gradients to the one before
LAST = (BACKWARD, WEIGHT)  # the kinds after which a stage holds nothing of a micro-batch
_ONE = re.compile(r"(\d+)(F|B|I|W|U|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


class PipeTask(NamedTuple):
    """One task of a rank's list."""

    stage: int
    kind: str
    batch: int  # number of the micro-batch
    parts: tuple[PipeTask, ...] = ()  # of an overlapped pair

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.batch}"

    @property
    def is_message(self) -> bool:
        return self.kind in SENDS or self.kind in RECEIVES

    @property
    def works(self) -> tuple[PipeTask, ...]:
        """The computations of this task: its parts, or itself."""
        return self.parts or (self,)


def overlapped(forward: PipeTask, backward: PipeTask) -> PipeTask:
    return PipeTask(forward.stage, OVERLAP, forward.batch, (forward, backward))


def read_task(text: str) -> PipeTask:
    """The task that a text such as `2F0` names."""
    pair = re.fullmatch(rf"\((.+);(.+)\){OVERLAP}", text.strip())
    if pair:
        return overlapped(read_task(pair[1]), read_task(pair[2]))
    found = _ONE.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"`{text}` is no task of a pipeline", hint="write the stage, what it does and the micro-batch: 2F0")
    return PipeTask(int(found[1]), found[2], int(found[3]))
