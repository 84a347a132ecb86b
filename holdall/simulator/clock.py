"""When everything happens: tasks on lanes, each lane served in order, copies sharing the link.

A lane is whatever works through its tasks one after the other: the device's compute stream, the host's processors, a stream of
copies. A task begins when it is the first of its lane and everything it waits for is done. Copies of one direction share its
rate; while bytes flow both ways each direction keeps `hardware.duplex` of its rate; a copy's latency takes time but no rate.
A computation cannot begin before the host has launched it: launches go on from the beginning of the step, one after the
other, whatever the device does, and a device that is through with its ops waits for the next launch.
The host's processors work on the memory that copies go over: they are slower while bytes flow, as slow as
`hardware.updates_beside` says while they flow both ways, and copies to the device keep `hardware.read_beside` of their rate.

    compute  |####|##########|....|######|          .... waits for the copy in
    launches |##|##|##|##|##|                       each op's, ahead of the op
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
_OF_HOST = {IN: 0.25, OUT: 0.75}  # of what copies both ways cost the host: 4.6 Gparam/s alone, 4.1 and 3.3 beside one, 2.9 both


@dataclass(slots=True)
class Task:
    """Something that occupies a lane: seconds of work, or bytes in a direction after a latency."""

    lane: str
    after: tuple[int, ...]  # tasks that must be done before
    seconds: float = 0.0  # of work, or of latency before the bytes flow
    nbytes: float = 0.0
    rate: float = 0.0
    direction: str = ""
    name: str = ""
    earliest: float = 0.0  # computation: when it can be over, by its launches alone
    start: float = 0.0
    end: float = 0.0


class Clock:
    """Told what the program issues, in its order; `run` then works out the times."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.tasks: list[Task] = []
        self._awaited: list[int] = []  # what the next computation waits for
        self._last = -1  # the last task of computation
        self._open = False  # whether it may still grow: nothing has been ordered after it
        self._launched = 0.0  # when the thread that launches is through with what it was told so far

    def launch(self, seconds: float) -> None:
        """The launching thread is busy for so long."""
        self._launched += seconds

    def compute(self, seconds: float) -> tuple[int, float]:
        """Computation, after all before it, launched by now; (task, when in it this begins)."""
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
        """Work on another lane than the device's, issued now; it does not wait for the device, only for `after`."""
        return self._add(Task(lane=lane, after=tuple(after), seconds=seconds, name=name))

    def wait(self, tasks: Iterable[int]) -> None:
        """Computation issued from here on waits for these."""
        self._awaited += tasks
        self._issued()

    def _issued(self) -> tuple[int, ...]:
        self._open = False
        return (self._last,) if self._last >= 0 else ()

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def run(self) -> float:
        """Fill in every task's start and end; the time when all is done, and computation has waited for what it awaits."""
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
        """Of a direction's rate, for each copy in it."""
        each = self.hardware.duplex if OUT in ways and IN in ways else 1.0
        left = {OUT: 1.0, IN: self.hardware.read_beside if is_host_busy else 1.0}
        return {d: each * left[d] / max(1, ways.count(d)) for d in (OUT, IN)}

    def _host_slower(self, ways: Sequence[str]) -> float:
        """How much longer the host's processors take for their work while bytes flow these ways."""
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
        """Start every head whose waiting is over; those that take no time are done at once and may let others go."""
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
