"""The model that guides the search: bytes that every op of a step needs, and how busy the link is at that time.

Bytes are those of the traced step less tensors that decisions take off the device for a while. A copy fills the first seconds
of its way of the link that are free after the tensor's last use in forward, and a fetch the last ones before it is needed; what
does not fit between both and the op at hand is waited for.
"""

from __future__ import annotations

from itertools import accumulate

from holdall.planners.capuchin.accesses import HeldTensor, ends_of_ops
from holdall.types import Problem

WAITED = -1  # in the place of an op: both copies of a swapped tensor are waited for


class Lane:
    """One way of the link: seconds that are free beside every op."""

    def __init__(self, seconds: list[float]) -> None:
        self.free = seconds
        self._count()

    def _count(self) -> None:
        self._sums = [0.0, *accumulate(self.free)]

    def between(self, first: int, last: int) -> float:
        """Free seconds beside the ops from `first` to `last`."""
        return max(0.0, self._sums[last + 1] - self._sums[first]) if first <= last else 0.0

    def fill(self, ops: range, seconds: float) -> int:
        """Take so many seconds, beside the first ops that have some; returns the last op of them."""
        at = ops.start
        for at in ops:
            taken = min(self.free[at], seconds)
            self.free[at] -= taken
            seconds -= taken
            if seconds <= 0:
                break
        self._count()
        return at


class StepModel:
    """Bytes and link of one step; decisions are told to it one by one."""

    def __init__(self, problem: Problem) -> None:
        trace = problem.trace
        self.problem, self.ends = problem, ends_of_ops(trace)
        live = [0] * (len(trace.ops) + 2)
        for x, info in trace.tensors.items():
            live[max(0, info.born)] += info.nbytes
            live[min(trace.last_held[x], len(trace.ops)) + 1] -= info.nbytes
        self.needed = [total + op.workspace for total, op in zip(accumulate(live), trace.ops, strict=False)]
        seconds = [op.seconds for op in trace.ops]
        self.out, self.into = Lane(list(seconds)), Lane(list(seconds))
        self.windows: dict[int, range] = {}  # swapped tensor -> the ops at which it is away

    @property
    def peak(self) -> int:
        """The op that needs most."""
        return max(range(len(self.needed)), key=self.needed.__getitem__, default=0)

    def waiting(self, tensor: HeldTensor, last: int, back: int, at: int) -> float:
        """Seconds that a step takes longer if the tensor is to be away at an op. `last`: the op after which it may leave;
        `back`: after which it is needed."""
        if not self.problem.hardware.overlap:
            return tensor.swap.out + tensor.swap.into
        late = max(0.0, tensor.swap.out - self.out.between(last + 1, at - 1))
        return late + max(0.0, tensor.swap.into - self.into.between(at + 1, back))

    def swap(self, tensor: HeldTensor, last: int, back: int, at: int) -> None:
        """The tensor is away at an op, and as long before and after it as copies permit; `at` WAITED: all the time."""
        window = range(last + 1, back + 1)
        if self.problem.hardware.overlap and at != WAITED:
            left = self.out.fill(range(last + 1, at), tensor.swap.out) if last + 1 < at else at - 1
            asked = self.into.fill(range(back, at, -1), tensor.swap.into) if back > at else at + 1
            window = range(left + 1, asked)
        self.windows[tensor.tensor] = window
        self.away(tensor.nbytes, window.start, window.stop - 1)

    def back(self, tensor: HeldTensor) -> None:
        """A swapped tensor stays after all; the link stays as busy as it was."""
        window = self.windows.pop(tensor.tensor)
        self.away(-tensor.nbytes, window.start, window.stop - 1)

    def away(self, nbytes: int, first: int, last: int) -> None:
        """So many bytes are not on the device from one op to another."""
        for k in range(first, last + 1):
            self.needed[k] -= nbytes
