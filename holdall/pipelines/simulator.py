"""Plays lowered lists: when each task runs, what every rank holds, and whether the lists end at all.

Every rank does its list in order. A computation starts when what it needs is there. Messages go in one of three ways:

    posted       neither end waits: a receive is posted, and the computation that needs it waits (torch's runtime)
    buffered     the sender goes on; a receive waits for its message
    rendezvous   sender and receiver wait for each other, and for the message

Messages from one rank to another have no names: they are received in the order in which they are sent, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdall.errors import InvalidInput, unknown_name
from holdall.pipelines.costs import PipeCosts
from holdall.pipelines.holding import Held, holdings
from holdall.pipelines.lowering import lower
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.tasks import BACKWARD, FORWARD, INPUT, RECEIVES, RECV_B, RECV_F, SEND_F, SENDS, UPDATE, PipeTask

POSTED, BUFFERED, RENDEZVOUS = "posted", "buffered", "rendezvous"
WAYS = (POSTED, BUFFERED, RENDEZVOUS)


class TaskSpan(NamedTuple):
    """A task in time."""

    rank: int
    task: PipeTask
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeTimeline:
    """A simulated step of a pipeline."""

    pipeline: Pipeline
    spans: tuple[TaskSpan, ...]  # computations, rank by rank, in order
    messages: tuple[TaskSpan, ...]  # sends: `rank` is the sender's
    held: tuple[Held, ...]  # rank -> what it holds at its peak

    @property
    def makespan(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    def idle(self, rank: int) -> float:
        """Seconds of the step in which a rank computes nothing."""
        return self.makespan - self.busy(rank)

    def idle_inside(self, rank: int) -> float:
        """Seconds in which a rank computes nothing between its first task and its last."""
        own = [span for span in self.spans if span.rank == rank]
        return own[-1].end - own[0].start - self.busy(rank)

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time."""
        ranks = self.pipeline.ranks
        return sum(map(self.idle, range(ranks))) / (ranks * self.makespan) if self.makespan else 0.0

    @property
    def activations(self) -> tuple[int, ...]:
        """Rank -> the most micro-batches of a stage that it holds at once."""
        return tuple(held.micro_batches for held in self.held)

    @property
    def versions(self) -> tuple[int, ...]:
        """Rank -> the most versions of a stage's weights at once."""
        return tuple(held.versions for held in self.held)

    @property
    def peak(self) -> tuple[int, ...]:
        """Rank -> the most bytes of activations and versions of weights at once."""
        return tuple(held.bytes for held in self.held)


def simulate(pipeline: Pipeline, costs: PipeCosts | None = None, *, sends: str = POSTED) -> PipeTimeline:
    """One step; without `costs`, all of F, I and W take one second and messages none.

    Raises `InvalidInput` if the lists never end.
    """
    return simulate_lists(pipeline, lower(pipeline), costs, sends=sends)


def simulate_lists(
    pipeline: Pipeline, lists: Sequence[Sequence[PipeTask]], costs: PipeCosts | None = None, *, sends: str = POSTED
) -> PipeTimeline:
    """One step of lists that have sends and receives already."""
    costs = costs or PipeCosts.even(pipeline.chain)
    if sends not in WAYS:
        raise unknown_name("way to send", sends, WAYS)
    if len(costs.stages) != pipeline.chain:
        raise InvalidInput(
            f"there are costs of {len(costs.stages)} stages, but `{pipeline.name}` has {pipeline.chain}",
            hint="one for each stage",
        )
    play = _Play(pipeline, [list(tasks) for tasks in lists], costs, sends)
    stuck = play.to_the_end()
    if stuck:
        raise InvalidInput(f"the lists of `{pipeline.name}` deadlock: {stuck}", hint="`lower` orders messages so that none do")
    return PipeTimeline(
        pipeline=pipeline,
        spans=tuple(sorted(play.spans, key=lambda span: (span.rank, span.start, span.end))),
        messages=tuple(play.messages),
        held=holdings(pipeline, lists, costs),
    )


def deadlock(pipeline: Pipeline, lists: Sequence[Sequence[PipeTask]], *, sends: str = POSTED) -> str:
    """Who waits for whom where lowered lists do not end; empty: they end."""
    return _Play(pipeline, [list(tasks) for tasks in lists], PipeCosts.even(pipeline.chain), sends).to_the_end()


@dataclass
class _Play:
    pipeline: Pipeline
    lists: list[list[PipeTask]]
    costs: PipeCosts
    sends: str
    spans: list[TaskSpan] = field(default_factory=list)
    messages: list[TaskSpan] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    ends: dict[tuple[int, str, int], float] = field(default_factory=dict)  # computation -> its end
    there: dict[tuple[int, str, int], float] = field(default_factory=dict)  # receive -> when the message has come
    sent: dict[tuple[int, int], list[tuple[PipeTask, float]]] = field(default_factory=dict)  # link -> not yet received
    posted: dict[tuple[int, int], list[PipeTask]] = field(default_factory=dict)  # link -> receives that wait
    link: dict[tuple[int, int], float] = field(default_factory=dict)  # link -> when it is free
    why: dict[int, str] = field(default_factory=dict)  # rank -> what it waits for
    crossed: dict[int, str] = field(default_factory=dict)  # rank -> the message that it gets in the place of another

    def to_the_end(self) -> str:
        self.clock = [0.0] * len(self.lists)
        self.at = [0] * len(self.lists)
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.lists)):
                while self.at[rank] < len(self.lists[rank]) and self._do(rank, self.lists[rank][self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        if self.crossed:
            return "; ".join(f"rank {rank} receives {what}" for rank, what in sorted(self.crossed.items()))
        left = [rank for rank, tasks in enumerate(self.lists) if self.at[rank] < len(tasks)]
        waits = [f"rank {rank} waits at `{self.lists[rank][self.at[rank]]}` for {self.why[rank]}" for rank in left]
        lost = [f"rank {to} never receives `{p[0]}`" for (_, to), p in self.posted.items() if p and not waits]
        unread = [f"rank {to} never receives `{s[0][0]}`" for (_, to), s in self.sent.items() if s and not waits]
        return "; ".join(waits + lost + unread)

    def _do(self, rank: int, task: PipeTask) -> bool:
        """Do a rank's next task; False: it must wait."""
        if task.kind in SENDS:
            return self._send(rank, task)
        if task.kind in RECEIVES:
            return self._receive(rank, task)
        start = self.clock[rank]
        for work in task.works:
            for need in self._needs(rank, task, work):
                ready = self.there.get(need, self.ends.get(need))
                if ready is None:
                    self.why[rank] = f"`{PipeTask(*need)}`"
                    return False
                start = max(start, ready)
        end = self.clock[rank] = start + self.costs.seconds(self.pipeline, task)
        for work in task.works:
            self.ends[_key(work)] = end
        self.spans.append(TaskSpan(rank, task, start, end))
        return True

    def _needs(self, rank: int, task: PipeTask, work: PipeTask) -> list[tuple[int, str, int]]:
        """Computations of this rank, and receives, that a computation waits for."""
        inside = {_key(part) for part in task.works}
        found = []
        for stage, kind, batch in self.pipeline.needs(work) if work.kind != UPDATE else ():
            if (stage, kind, batch) in inside:
                continue
            if self.pipeline.rank_of[stage] == rank:
                found.append((stage, kind, batch))
            else:
                found.append((work.stage, RECV_F if kind == FORWARD else RECV_B, batch))
        return found

    def _other(self, task: PipeTask) -> PipeTask:
        """The send of a receive, or the receive of a send."""
        step = 1 if task.kind in (SEND_F, RECV_B) else -1
        kind = task.kind.replace("SEND", "RECV") if task.kind in SENDS else task.kind.replace("RECV", "SEND")
        return PipeTask(task.stage + step, kind, task.batch)

    def _send(self, rank: int, task: PipeTask) -> bool:
        made = (task.stage, FORWARD if task.kind == SEND_F else BACKWARD, task.batch)
        other = self._other(task)
        to = self.pipeline.rank_of[other.stage]
        if made not in self.ends:
            self.why[rank] = f"`{PipeTask(*made)}`"
            return False
        seconds = self.costs.transfer(self.costs.of(self.pipeline, min(task.stage, other.stage)).sent)
        if self.sends == RENDEZVOUS:
            return self._meet(rank, to, task, other, seconds)
        start = max(self.clock[rank], self.link.get((rank, to), 0.0))
        self.link[rank, to] = start + seconds
        self.sent.setdefault((rank, to), []).append((other, start + seconds))
        self.messages.append(TaskSpan(rank, task, start, start + seconds))
        self._match(rank, to)
        return True

    def _match(self, rank: int, to: int) -> None:
        """Hand messages to receives, in order; a receive that gets another's message is never served."""
        sent, posted = self.sent.get((rank, to), []), self.posted.get((rank, to), [])
        while sent and posted and sent[0][0] == posted[0]:
            self.there[_key(posted.pop(0))] = sent.pop(0)[1]
        if sent and posted:
            self.crossed[to] = f"`{self._other(posted[0])}`, but rank {rank} sent `{self._other(sent[0][0])}` first"

    def _meet(self, rank: int, to: int, task: PipeTask, other: PipeTask, seconds: float) -> bool:
        """Both ends of a rendezvous, done when the second of them comes."""
        if self.at[to] >= len(self.lists[to]) or self.lists[to][self.at[to]] != other:
            self.why[rank] = f"rank {to} to come to `{other}`"
            return False
        start = max(self.clock[rank], self.clock[to])
        self.clock[rank] = self.clock[to] = start + seconds
        self.at[to] += 1
        self.there[_key(other)] = start + seconds
        self.messages.append(TaskSpan(rank, task, start, start + seconds))
        return True

    def _receive(self, rank: int, task: PipeTask) -> bool:
        other = self._other(task)
        sender = self.pipeline.rank_of[other.stage]
        if self.sends == RENDEZVOUS:
            self.why[rank] = f"rank {sender} to come to `{other}`"
            return False  # the sender does both ends
        if self.sends == POSTED:
            self.posted.setdefault((sender, rank), []).append(task)
            self._match(sender, rank)
            return True
        waiting = self.sent.get((sender, rank), [])
        if not waiting:
            self.why[rank] = f"rank {sender} to come to `{other}`"
            return False
        if waiting[0][0] != task:
            self.crossed[rank] = f"`{other}`, but rank {sender} sent `{self._other(waiting[0][0])}` first"
            return False
        self.there[_key(task)] = waiting.pop(0)[1]
        self.clock[rank] = max(self.clock[rank], self.there[_key(task)])
        return True


def _key(task: PipeTask) -> tuple[int, str, int]:
    return (task.stage, BACKWARD if task.kind == INPUT else task.kind, task.batch)
