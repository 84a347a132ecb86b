"""The lifetimes of a planned step's tensors, as the simulator allocates and frees them: the input of every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdall.simulator.allocators import Recording
from holdall.simulator.lower import close, lower
from holdall.simulator.replay import replay
from holdall.types import Action, Hardware, Outcome, Phase, Problem, Schedule, Step
from holdall.types.layout import BLOCK, round_up
from holdall.types.lifetimes import Lifetime, StepLifetimes
from holdall.types.trace import Bytes

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


def count_at_start(schedule: Schedule) -> int:
    """Number of tensors on the device when a step begins; they are the first to be allocated."""
    info = {**schedule.trace.tensors, **schedule.added}
    return sum(t.born < 0 and schedule.start.get(x, schedule.home) == schedule.home for x, t in info.items())


def lifetimes_of(order: Sequence[tuple[int, Bytes]], there: int = 0, *, align: int = 1) -> StepLifetimes:
    """Pair allocations with frees, a size of -1. The first `there` entries are tensors present when a step begins.

    Those are alive from moment 0 on; the first allocation or free of the step is moment 1. What nothing frees stays to the end.
    """
    period = len(order) - there + 1
    begun: dict[int, tuple[int, Bytes]] = {}  # key -> number of its allocation, size
    found: list[tuple[int, Lifetime]] = []

    def end(key: int, moment: int) -> None:
        number, nbytes = begun.pop(key)
        found.append((number, Lifetime(key, max(number - there + 1, 0), moment, round_up(nbytes, align))))

    for number, (key, size) in enumerate(order):
        if size < 0:
            end(key, max(number - there + 1, 0))
        else:
            begun[key] = (number, size)
    for key in list(begun):
        end(key, period)
    return StepLifetimes(tuple(t for _, t in sorted(found) if t.size and t.begin < t.end), period, align)
