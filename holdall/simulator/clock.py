"""Computes start and end times: tasks on lanes, each lane in order, copies sharing the link.

A lane runs its tasks one after the other: the device's compute stream, the host's processors, a copy stream. A task begins when
it is the first of its lane and everything it waits for is done. Copies in one direction share its rate; while bytes flow both
ways, each direction keeps `hardware.duplex` of its rate; a copy's latency takes time but no rate. A computation cannot begin
before the host has launched it: launches run one after the other from the beginning of the step, whatever the device does, and
a device that has finished its ops waits for the next launch. Host updates and copies share the host's memory: updates are
slower while bytes flow, by `hardware.updates_beside` while they flow both ways, and copies to the device keep
`hardware.read_beside` of their rate.

    compute  |####|##########|....|######|          .... waits for the copy in
    launches |##|##|##|##|##|                       each op's, before the op
    out           |lat|##shared##|
    in                |lat|#shared#|##full##|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdall.cost.link import IN, OUT, link_rate
from holdall.types import Hardware

COMPUTE, HOST = "compute", "host"
_NEVER = float("inf")
_OF_HOST = {IN: 0.25, OUT: 0.75}  # share of the slowdown per direction: 4.6 Gparam/s alone, 4.1 and 3.3 with one, 2.9 with both


@dataclass(slots=True)
class Task:
    """Occupies a lane: seconds of work, or bytes in a direction after a latency."""

    lane: str
    after: tuple[int, ...]  # tasks that must finish first
    seconds: float = 0.0  # of work, or of latency before the bytes flow
    nbytes: float = 0.0
    rate: float = 0.0
    direction: str = ""
    name: str = ""
    earliest: float = 0.0  # computation: earliest end by its launches alone
    start: float = 0.0
    end: float = 0.0


class Clock:
    """Receives the program's tasks in order; `run` computes their times."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.tasks: list[Task] = []
        self._awaited: list[int] = []  # tasks that the next computation waits for
        self._last = -1  # the last compute task
        self._open = False  # it can still be extended: no task follows it
        self._launched = 0.0  # when the launching thread finishes its current launches

    def launch(self, seconds: float) -> None:
        """The launching thread is busy for this long."""
        self._launched += seconds

    def compute(self, seconds: float) -> tuple[int, float]:
        """Computation after all earlier ones, already launched; returns (task, its offset within the task)."""
        if self._open and not self._awaited:
            task = self.tasks[self._last]
            begins = task.seconds
            task.seconds += seconds
            task.earliest = max(task.earliest, self._launched) + seconds
            return self._last, begins
        before = (self._last,) if self._last >= 0 else ()
        earliest = self._launched + seconds
        self._last = self._add(Task(lane=COMPUTE, after=(*before, *self._awaited), seconds=seconds, earliest=earliest))
        self._awaited = []
        self._open = True
        return self._last, 0.0

    def copy(self, far: str, direction: str, nbytes: int, *, after: Iterable[int] = (), lane: str = "", name: str = "") -> int:
        """A copy issued now: it follows the computation issued so far, and `after`."""
        tier = self.hardware.tier(far)
        rate = link_rate(tier, direction)
        task = Task(
            lane=f"copy {direction} {lane}".rstrip(),
            after=(*self._issued(), *after),
            seconds=tier.latency,
            nbytes=float(nbytes),
            rate=rate,
            direction=direction,
            name=name,
        )
        return self._add(task)

    def beside(self, lane: str, seconds: float, *, after: Iterable[int] = (), name: str = "") -> int:
        """Work on another lane than the device's, issued now; it waits only for `after`."""
        return self._add(Task(lane=lane, after=tuple(after), seconds=seconds, name=name))

    def wait(self, tasks: Iterable[int]) -> None:
        """Computation issued from now on waits for these tasks."""
        self._awaited += tasks
        self._issued()

    def _issued(self) -> tuple[int, ...]:
        self._open = False
        return (self._last,) if self._last >= 0 else ()

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def run(self) -> float:
        """Compute every task's start and end; returns the time when everything is done."""
        lanes: dict[str, list[int]] = {}
        for n, task in enumerate(self.tasks):
            lanes.setdefault(task.lane, []).append(n)
        heads = dict.fromkeys(lanes, 0)
        done = [False] * len(self.tasks)
        active: dict[str, list[float]] = {}  # lane -> [seconds left, bytes left]
        now = 0.0
        while True:
            self._begin(lanes, heads, done, active, now)
            if not active:
                break
            flowing = {
                lane: self.tasks[lanes[lane][heads[lane]]] for lane, left in active.items() if left[0] <= 0 and left[1] > 0
            }
            ways = [task.direction for task in flowing.values()]
            share = self._shares(ways, is_host_busy=HOST in active)
            slower = self._host_slower(ways)
            turn = _NEVER
            for lane, (seconds, nbytes) in active.items():
                if seconds > 0:
                    left = seconds * slower if lane == HOST else seconds
                else:
                    left = nbytes / (flowing[lane].rate * share[flowing[lane].direction])
                turn = min(turn, left)
            now += turn
            for lane in list(active):
                left_over = active[lane]
                if left_over[0] > 0:
                    worked = turn / slower if lane == HOST else turn
                    left_over[0] = 0.0 if left_over[0] <= worked * (1 + 1e-12) else left_over[0] - worked
                else:
                    task = flowing[lane]
                    flowed = turn * task.rate * share[task.direction]
                    left_over[1] = 0.0 if left_over[1] <= flowed * (1 + 1e-12) else left_over[1] - flowed
                if left_over[0] <= 0 and left_over[1] <= 0:
                    self._end(lanes, heads, done, active, lane, now)
        assert all(done), "tasks wait for each other"
        return max((task.end for task in self.tasks), default=0.0)

    def _shares(self, ways: Sequence[str], *, is_host_busy: bool) -> dict[str, float]:
        """The share of a direction's rate for each copy in it."""
        each = self.hardware.duplex if OUT in ways and IN in ways else 1.0
        left = {OUT: 1.0, IN: self.hardware.read_beside if is_host_busy else 1.0}
        return {d: each * left[d] / max(1, ways.count(d)) for d in (OUT, IN)}

    def _host_slower(self, ways: Sequence[str]) -> float:
        """The slowdown factor of the host's processors while bytes flow these ways."""
        alone, beside = self.hardware.updates, self.hardware.updates_beside
        return 1 + (alone / beside - 1) * sum(_OF_HOST[d] for d in set(ways)) if beside else 1.0

    def _begin(
        self,
        lanes: dict[str, list[int]],
        heads: dict[str, int],
        done: list[bool],
        active: dict[str, list[float]],
        now: float,
    ) -> None:
        """Start every first task whose dependencies are done; tasks without duration finish at once and may release others."""
        again = True
        while again:
            again = False
            for lane, numbers in lanes.items():
                if lane in active or heads[lane] >= len(numbers):
                    continue
                task = self.tasks[numbers[heads[lane]]]
                if not all(done[n] for n in task.after):
                    continue
                task.start = now
                seconds = max(task.seconds, task.earliest - now)
                active[lane] = [seconds, task.nbytes]
                if seconds <= 0 and task.nbytes <= 0:
                    self._end(lanes, heads, done, active, lane, now)
                    again = True

    def _end(
        self,
        lanes: dict[str, list[int]],
        heads: dict[str, int],
        done: list[bool],
        active: dict[str, list[float]],
        lane: str,
        now: float,
    ) -> None:
        number = lanes[lane][heads[lane]]
        self.tasks[number].end = now
        done[number] = True
        heads[lane] += 1
        del active[lane]
