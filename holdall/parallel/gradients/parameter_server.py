"""The parameter server (Li et al., OSDI 2014) and Downpour SGD (DistBelief, NeurIPS 2012): workers push gradients to servers
that hold the weights, and pull weights from them.

Simulated in one process: what is computed is real, and when is not. `train_on_server` plays workers of given speeds. How far
the fastest may be ahead of the slowest says which of the published rules it is:

    staleness=0      bulk synchronous: the gradients of all workers make one update, as in an all-reduce
    staleness=s      stale synchronous (SSP): a worker waits if it is more than s steps ahead; every push is an update
    staleness=None   asynchronous (Downpour): nobody waits

`server_seconds` is the cost of one step's messages, to be compared with that of a ring (`cost/collectives.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from holdall.errors import InvalidInput
from holdall.types.mesh import Network

Tensors = list[torch.Tensor]
Gradient = Callable[[Tensors, int, int], Sequence[torch.Tensor]]  # (weights, worker, step) -> gradients


def server_seconds(nbytes: int, workers: int, servers: int, network: Network) -> float:
    """All workers push `nbytes` to servers that hold equal parts of the weights, and pull as many.

    In every round a worker meets one server: each way takes as many rounds as the larger of the two groups has members, and a
    message of a round has a server's part.
    """
    if min(workers, servers) < 1:
        raise InvalidInput(f"{workers} workers and {servers} servers", hint="use one of each or more")
    return 2 * max(workers, servers) * (network.latency + nbytes / servers / network.rate)


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One step of a worker in time."""

    worker: int
    step: int
    start: float
    end: float


@dataclass(slots=True)
class ServedRun:
    """A simulated run."""

    weights: Tensors
    steps: list[WorkerStep] = field(default_factory=list)  # in the order in which they began
    updates: int = 0

    @property
    def seconds(self) -> float:
        return max((step.end for step in self.steps), default=0.0)


def train_on_server(
    weights: Sequence[torch.Tensor],
    gradient: Gradient,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    seconds: Sequence[Sequence[float]],
    *,
    staleness: int | None = 0,
    fetch: int = 1,
    push: int = 1,
) -> ServedRun:
    """Train to the end of every worker's steps. `seconds`: for each worker, the time of each of its steps; messages take none.

    `optimizer`: the server's rule, such as `lambda weights: torch.optim.Adagrad(weights, lr=0.1)`. A worker pulls weights
    before every `fetch`-th step and pushes the sum of its gradients after every `push`-th. With `staleness=0`, an update has
    the mean of what all workers push; else it has what one of them does.
    """
    if len({len(own) for own in seconds}) != 1 or min(fetch, push) < 1 or (staleness is not None and staleness < 0):
        raise InvalidInput(
            "every worker needs as many steps as the others, and fetch, push and staleness are not negative",
            hint="use seconds=[[1.0] * steps] * workers, fetch=1, push=1, staleness=0",
        )
    return _Play(weights, gradient, optimizer, seconds, staleness, fetch, push).to_the_end()


class _Play:
    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        gradient: Gradient,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        seconds: Sequence[Sequence[float]],
        staleness: int | None,
        fetch: int,
        push: int,
    ) -> None:
        self._server = [torch.nn.Parameter(w.detach().clone()) for w in weights]
        self._optimizer = optimizer(self._server)
        self._gradient, self._seconds, self._staleness = gradient, seconds, staleness
        self._fetch, self._push = fetch, push
        count = len(seconds)
        self._done = [0] * count  # steps that a worker has done
        self._local: list[Tensors] = [[] for _ in range(count)]  # the weights that it computes with
        self._sums: list[Tensors] = [[] for _ in range(count)]  # of its gradients since its last push
        self._pushed: dict[int, Tensors] = {}  # worker -> what waits for the others' pushes
        self._run = ServedRun([])

    def to_the_end(self) -> ServedRun:
        ends: list[tuple[float, int]] = []
        waiting = list(range(len(self._seconds)))
        now = 0.0
        while True:
            for worker in [worker for worker in waiting if self._may_begin(worker)]:
                waiting.remove(worker)
                if self._done[worker] < len(self._seconds[worker]):
                    heappush(ends, (self._begin(worker, now), worker))
            if not ends:
                break
            now, worker = heappop(ends)
            self._end(worker)
            waiting = sorted([*waiting, worker])
        self._run.weights = [p.detach().clone() for p in self._server]
        return self._run

    def _may_begin(self, worker: int) -> bool:
        return self._staleness is None or self._done[worker] - min(self._done) <= self._staleness

    def _begin(self, worker: int, now: float) -> float:
        step = self._done[worker]
        if step % self._fetch == 0:
            self._local[worker] = [p.detach().clone() for p in self._server]
        end = now + self._seconds[worker][step]
        self._run.steps.append(WorkerStep(worker, step, now, end))
        return end

    def _end(self, worker: int) -> None:
        found = self._gradient(self._local[worker], worker, self._done[worker])
        sums = self._sums[worker]
        self._sums[worker] = [a + b for a, b in zip(sums, found, strict=True)] if sums else [g.clone() for g in found]
        self._done[worker] += 1
        if self._done[worker] % self._push == 0:
            pushed, self._sums[worker] = self._sums[worker], []
            if self._staleness == 0:
                self._pushed[worker] = pushed
                if len(self._pushed) < len(self._seconds):
                    return
                all_pushed = [self._pushed.pop(other) for other in range(len(self._seconds))]
                pushed = [torch.stack(each).sum(0) / len(all_pushed) for each in zip(*all_pushed, strict=True)]
            self._update(pushed)

    def _update(self, gradients: Tensors) -> None:
        for p, grad in zip(self._server, gradients, strict=True):
            p.grad = grad
        self._optimizer.step()
        self._run.updates += 1
