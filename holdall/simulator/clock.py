"""When everything happens: tasks on lanes, each lane served in order, copies sharing the links.

A lane is whatever works through its tasks one after the other: the device's compute stream, the host's processors, a stream of
copies from one tier to another. A task begins when it is the first of its lane and everything it waits for is done. Copies of
one direction share the rate of their link; while bytes flow both ways on a wire, each direction keeps its link's `duplex` of
the rate; a copy's latency takes time but no rate. Copies on different wires do not hinder each other. A copy that passes
through a tier is on all its links at once, at the rate of the slowest, and leaves the rest of the others to other copies.
A computation cannot begin before the host has launched it: launches go on from the beginning of the step, one after the
other, whatever the device does, and a device that is through with its ops waits for the next launch.
The host's processors work on the memory that copies go over: they are slower while bytes flow, as slow as
`hardware.updates_beside` says while they flow both ways, and copies to the device keep `hardware.read_beside` of their rate.

    compute  |####|##########|....|######|          .... waits for the copy in
    launches |##|##|##|##|##|                       each op's, before the op
    out           |lat|##shared##|
    in                |lat|#shared#|##full##|
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdall.types import Hardware, Link

COMPUTE, HOST = "compute", "host"
_NEVER = float("inf")
_IN, _OUT = 0.25, 0.75  # of what copies both ways cost the host: 4.6 Gparam/s alone, 4.1 and 3.3 beside one, 2.9 both


Way = tuple[str, str]  # the tier that bytes come from, and the one that they go to


class _Flow(NamedTuple):
    """Bytes per second that a copy gets of its slowest link: the rate that link has alone, and the share of it."""

    rate: float
    share: float


def _speed(flow: _Flow) -> float:
    return flow.rate * flow.share


def lane_of(hardware: Hardware, source: str, destination: str) -> str:
    """The lane of copies between two tiers; those between the accelerator and the nearest need no name."""
    home, near = hardware.home.name, hardware.far.name if hardware.far is not None else ""
    if source == home:
        return "copy out" if destination == near else f"copy out to {destination}"
    if destination == home:
        return "copy in" if source == near else f"copy in from {source}"
    return f"copy {source} to {destination}"


@dataclass(slots=True)
class Task:
    """Something that occupies a lane: seconds of work, or bytes on their way after a latency."""

    lane: str
    after: tuple[int, ...]  # tasks that must finish first
    seconds: float = 0.0  # of work, or of latency before the bytes flow
    nbytes: float = 0.0
    way: Way = ("", "")
    name: str = ""
    earliest: float = 0.0  # computation: earliest end by its launches alone
    start: float = 0.0
    end: float = 0.0


class Clock:
    """Receives the program's tasks in order; `run` computes their times."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.tasks: list[Task] = []
        self._paths: dict[Way, tuple[Link, ...]] = {}
        self._latency: dict[Way, float] = {}
        self._lanes: dict[Way, str] = {}
        self._known: dict[tuple[tuple[Way, ...], bool], tuple[dict[Way, _Flow], float]] = {}
        self._order = {tier.name: n for n, tier in enumerate(hardware.tiers)}
        home, host = hardware.home.name, hardware.far.name if hardware.far is not None else ""
        self._to_host, self._from_host = (home, host), (host, home)
        self._awaited: list[int] = []  # what the next computation waits for
        self._last = -1  # the last task of computation
        self._open = False  # whether it may still grow: nothing has been ordered after it
        self._launched = 0.0  # when the thread that launches is through with what it was told so far

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

    def copy(
        self, source: str, destination: str, nbytes: int, *, after: Iterable[int] = (), lane: str = "", name: str = ""
    ) -> int:
        """A copy issued now: it follows the computation issued so far, and `after`."""
        way = source, destination
        if way not in self._paths:
            self._paths[way] = path = self.hardware.path(source, destination)
            self._latency[way] = sum(link.latency for link in path)
            self._lanes[way] = lane_of(self.hardware, source, destination)
        task = Task(
            lane=f"{self._lanes[way]} {lane}".rstrip(),
            after=(*self._issued(), *after),
            seconds=self._latency[way],
            nbytes=float(nbytes),
            way=way,
            name=name,
        )
        return self._add(task)

    def collect(self, lane: str, seconds: float, *, after: Iterable[int] = (), name: str = "") -> int:
        """A collective issued now: it follows the computation issued so far, and `after`."""
        return self._add(Task(lane=lane, after=(*self._issued(), *after), seconds=seconds, name=name))

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
            rates, slower = self._rates(tuple(task.way for task in flowing.values()), HOST in active)
            turn = _NEVER
            for lane, (seconds, nbytes) in active.items():
                if seconds > 0:
                    left = seconds * slower if lane == HOST else seconds
                else:
                    left = nbytes / _speed(rates[flowing[lane].way])
                turn = min(turn, left)
            now += turn
            for lane in list(active):
                left_over = active[lane]
                if left_over[0] > 0:
                    worked = turn / slower if lane == HOST else turn
                    left_over[0] = 0.0 if left_over[0] <= worked * (1 + 1e-12) else left_over[0] - worked
                else:
                    flow = rates[flowing[lane].way]
                    flowed = turn * flow.rate * flow.share
                    left_over[1] = 0.0 if left_over[1] <= flowed * (1 + 1e-12) else left_over[1] - flowed
                if left_over[0] <= 0 and left_over[1] <= 0:
                    self._end(lanes, heads, done, active, lane, now)
        assert all(done), "tasks wait for each other"
        return max((task.end for task in self.tasks), default=0.0)

    def _rates(self, ways: tuple[Way, ...], is_host_busy: bool) -> tuple[dict[Way, _Flow], float]:
        """For each copy on these ways its rate, and how much longer the host's processors take meanwhile."""
        key = ways, is_host_busy
        if key not in self._known:
            used = {(link.source, link.destination) for way in ways for link in self._paths[way]}
            self._known[key] = self._share(ways, is_host_busy), self._host_slower(used)
        return self._known[key]

    def _share(self, ways: Sequence[Way], is_host_busy: bool) -> dict[Way, _Flow]:
        """Each direction of a wire is shared evenly; what a copy cannot use of its share, since another of its links is
        slower, is left to the others."""
        waiting = {way: ways.count(way) for way in ways}
        sides = {link: self._side(link) for way in waiting for link in self._paths[way]}
        both = {wire for wire, outward in sides.values() if (wire, not outward) in sides.values()}
        factor = {link: link.duplex if side[0] in both else 1.0 for link, side in sides.items()}
        for link in factor:
            if is_host_busy and (link.source, link.destination) == self._from_host:
                factor[link] *= self.hardware.read_beside
        users = {
            side: sum(n for way, n in waiting.items() for link in self._paths[way] if sides[link] == side)
            for side in sides.values()
        }
        free = dict.fromkeys(users, 1.0)
        found: dict[Way, _Flow] = {}
        while waiting:
            offers = {
                way: min(
                    (_Flow(link.rate, factor[link] * free[sides[link]] / users[sides[link]]) for link in self._paths[way]),
                    key=_speed,
                )
                for way in waiting
            }
            least = min(_speed(flow) for flow in offers.values())
            for way in [way for way in waiting if _speed(offers[way]) == least]:
                found[way] = offers[way]
                count = waiting.pop(way)
                for link in self._paths[way]:
                    users[sides[link]] -= count
                    free[sides[link]] -= count * least / (link.rate * factor[link])
        return found

    def _side(self, link: Link) -> tuple[str, bool]:
        """The wire that a link is on, and whether it leads away from the accelerator."""
        return link.shared, self._order[link.source] < self._order[link.destination]

    def _host_slower(self, used: Collection[Way]) -> float:
        """How much longer the host's processors take for their work while bytes flow on these links."""
        alone, beside = self.hardware.updates, self.hardware.updates_beside
        if not beside:
            return 1.0
        return 1 + (alone / beside - 1) * ((_IN if self._from_host in used else 0) + (_OUT if self._to_host in used else 0))

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
