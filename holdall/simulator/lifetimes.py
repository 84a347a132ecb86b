"""The lifetimes of a planned step's tensors, as the simulator allocates and frees them: the input of every layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdall.simulator.allocators import Recording
from holdall.simulator.lower import close, lower
from holdall.simulator.replay import replay
from holdall.types import Action, Hardware, Outcome, Phase, Problem, Schedule, Step
from holdall.types.layout import BLOCK
from holdall.types.lifetimes import Lifetime, StepLifetimes, lifetimes_of
from holdall.types.trace import TensorId

HOST_ALIGN = 64  # bytes; torch aligns memory on the host by it


@dataclass(frozen=True)
class PlannedStep:
    """A step as it will run, with every free: who changes the order of its steps makes another one."""

    schedule: Schedule
    hardware: Hardware
    steps: Sequence[Step]

    @classmethod
    def of(cls, problem: Problem, actions: Iterable[Action]) -> PlannedStep:
        schedule = lower(problem, actions)
        return cls(schedule, problem.hardware, close(schedule))

    def run(self) -> tuple[StepLifetimes, Outcome]:
        """Simulate it: the lifetimes on the device, and the outcome with the peak that they add up to."""
        recording = Recording()
        outcome = replay(self.steps, self.schedule, self.hardware, allocator=recording)
        align = BLOCK if self.hardware.device == "cuda" else HOST_ALIGN
        found = lifetimes_of(recording.order, count_at_start(self.schedule), align=align)
        found = replace(found, tensors=tuple(joined(found, self.schedule.carried)))
        return replace(found, phases=self._phases(found)), outcome

    def _phases(self, lifetimes: StepLifetimes) -> tuple[int, ...]:
        """The moments at which backward and the optimizer's step make their first tensors."""
        trace = self.schedule.trace
        first: dict[Phase, int] = {}
        for tensor in lifetimes.tensors:
            born = trace.tensors[tensor.key].born if tensor.key in trace.tensors else -1
            if born >= 0:
                first.setdefault(trace.ops[born].site.phase, tensor.begin)
        return tuple(sorted(first[phase] for phase in (Phase.BACKWARD, Phase.STEP) if phase in first))


def joined(lifetimes: StepLifetimes, carried: Mapping[TensorId, TensorId]) -> Iterator[Lifetime]:
    """The lifetimes, those of tensors that steps leave to the next as one each."""
    ends = {carried[t.key]: t.end for t in lifetimes.tensors if t.begin == 0 and t.key in carried}
    left = {t.key for t in lifetimes.tensors if t.begin > 0 and t.end == lifetimes.period and t.key in ends}
    for t in lifetimes.tensors:
        if t.begin > 0 and t.key in left and t.end == lifetimes.period:
            yield t._replace(end=ends[t.key])
        elif not (t.begin == 0 and carried.get(t.key) in left):
            yield t


def count_at_start(schedule: Schedule) -> int:
    """Number of tensors on the device when a step begins; they are the first to be allocated."""
    info = {**schedule.trace.tensors, **schedule.added}
    return sum(t.born < 0 and schedule.start.get(x, schedule.home) == schedule.home for x, t in info.items())
