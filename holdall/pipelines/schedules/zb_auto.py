"""The zero-bubble paper's automatic schedule: the best order of F, I and W that a search finds under a limit of memory.

Ranks are filled in the order of time. A rank takes the gradient of inputs or the forward that is ready, never more than `most`
micro-batches at once, and puts gradients of weights into the gaps: always, or only where they delay nothing that is known to
come. Which of the two goes first, how many forwards begin, and whether gaps are kept free is tried in all combinations; ZB-H1
and ZB-H2 are among the candidates where their memory is allowed. The shortest by the simulator is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from holdall.pipelines.costs import PipeCosts
from holdall.pipelines.pipeline import Pipeline, in_rounds, make, require
from holdall.pipelines.schedules._zero_bubble import in_halves
from holdall.pipelines.tasks import FORWARD, INPUT, WEIGHT, PipeTask


@dataclass(frozen=True, slots=True, kw_only=True)
class ZbAuto:
    name: ClassVar[str] = "zb_auto"
    paper: ClassVar[str] = "Zero Bubble Pipeline Parallelism, ICLR 2024"
    is_exact: ClassVar[bool] = True

    most: int = 0  # micro-batches that a rank may hold; 0: as many as there are ranks, which is the memory of 1F1B's first
    forward: float = 1.0  # seconds of a stage
    input: float = 1.0
    weight: float = 1.0
    hop: float = 0.0

    def __call__(self, ranks: int, micro_batches: int) -> Pipeline:
        require(self.most >= 0, self.name, f"memory for one micro-batch or more, not {self.most}", "use zb_auto:most=8")
        costs = PipeCosts.even(ranks, hop=self.hop, forward=self.forward, input=self.input, weight=self.weight)
        return search_order(costs, micro_batches, most=self.most or ranks)


def search_order(costs: PipeCosts, micro_batches: int, *, most: int) -> Pipeline:
    """The shortest order found for stages of these costs, one a rank, each with at most so many micro-batches."""
    from holdall.pipelines.simulator import simulate

    least = _least(costs, micro_batches)
    found: tuple[float, Pipeline] | None = None
    seen: set[tuple[tuple[PipeTask, ...], ...]] = set()
    for lists in _orders(costs, micro_batches, most):
        made = make(ZbAuto.name, lists, in_rounds(len(lists), len(lists)), micro_batches)
        if made.lists not in seen:
            seen.add(made.lists)
            timed = simulate(made, costs)
            if max(timed.activations) <= most and (found is None or timed.makespan < found[0] - 1e-12):
                found = (timed.makespan, made)
                if timed.makespan <= least + 1e-12:
                    break
    assert found is not None, "the filled orders hold no more than they may"
    return found[1]


def _least(costs: PipeCosts, micro_batches: int) -> float:
    """No order is shorter: the first micro-batch comes to a stage, which then works without a pause."""
    come, found = 0.0, 0.0
    for stage in costs.stages:
        found = max(found, come + micro_batches * (stage.forward + stage.backward))
        come += stage.forward + costs.transfer(stage.sent)
    return found


def _orders(costs: PipeCosts, micro_batches: int, most: int) -> Iterator[Sequence[Sequence[PipeTask]]]:
    ranks = len(costs.stages)
    for first in (ranks - 1, *range(ranks, min(2 * ranks - 1, most))):  # H1 and H2, and what is between
        ahead = [min(micro_batches, first * (ranks - 1 - s) // max(1, ranks - 1)) for s in range(ranks)]
        yield [in_halves(s, ahead[s], first - ahead[s], micro_batches) for s in range(ranks)]
    limits = (
        [min(most, ranks - s) for s in range(ranks)],
        [min(most, 2 * (ranks - s) - 1) for s in range(ranks)],
        [most] * ranks,
    )
    for begun, inputs_first, keeps_gaps, early in product(limits, (True, False), (True, False), (True, False)):
        filling = _Filling(costs, micro_batches, most, begun, inputs_first=inputs_first, keeps_gaps=keeps_gaps, early=early)
        yield filling.lists()


class _Filling:
    """One way to fill the ranks in the order of time."""

    def __init__(
        self,
        costs: PipeCosts,
        micro_batches: int,
        most: int,
        begun: Sequence[int],
        *,
        inputs_first: bool,
        keeps_gaps: bool,
        early: bool,
    ) -> None:
        self.costs, self.count, self.most, self.begun = costs, micro_batches, most, begun
        self.inputs_first, self.keeps_gaps, self.early = inputs_first, keeps_gaps, early
        self.ranks = len(costs.stages)
        self.free = [0.0] * self.ranks
        self.done = [dict.fromkeys((FORWARD, INPUT, WEIGHT), 0) for _ in range(self.ranks)]
        self.ends: dict[tuple[int, str, int], float] = {}
        self.made: list[list[PipeTask]] = [[] for _ in range(self.ranks)]

    def lists(self) -> list[list[PipeTask]]:
        for _ in range(3 * self.count * self.ranks):
            ready = [(*found, s) for s in range(self.ranks) if (found := self._next(s)) is not None]
            start, kind, s = min(ready, key=lambda entry: (entry[0], -entry[2]))
            costs, batch = self.costs.stages[s], self.done[s][kind]
            end = start + {FORWARD: costs.forward, INPUT: costs.input, WEIGHT: costs.weight}[kind]
            self.ends[s, kind, batch], self.free[s] = end, end
            self.done[s][kind] += 1
            self.made[s].append(PipeTask(s, kind, batch))
        return self.made

    def _ready(self, s: int, kind: str) -> float | None:
        """When a rank's next task of a kind may start; None: what it needs is not planned yet, or it may not."""
        batch = self.done[s][kind]
        if batch == self.count:
            return None
        if kind == FORWARD:
            held = batch - self.done[s][WEIGHT]
            if held >= self.most or (not self.done[s][INPUT] and batch >= self.begun[s]):
                return None
            before = self._come(s - 1, FORWARD, batch, s - 1) if s else 0.0
            return None if before is None else max(self.free[s], before)
        if kind == INPUT:
            own = self.ends.get((s, FORWARD, batch))
            after = self._come(s + 1, INPUT, batch, s) if s < self.ranks - 1 else 0.0
            return None if own is None or after is None else max(self.free[s], own, after)
        return self.free[s] if batch < self.done[s][INPUT] else None

    def _come(self, stage: int, kind: str, batch: int, sender: int) -> float | None:
        """When the message of a neighbour is there; its bytes are those of the output of stage `sender`."""
        end = self.ends.get((stage, kind, batch))
        return None if end is None else end + self.costs.transfer(self.costs.stages[sender].sent)

    def _next(self, s: int) -> tuple[float, str] | None:
        """The start and kind of a rank's next task; None: it waits for tasks that are not planned yet."""
        times = {kind: at for kind in (INPUT, FORWARD, WEIGHT) if (at := self._ready(s, kind)) is not None}
        others = {kind: at for kind, at in times.items() if kind != WEIGHT}
        if not others:
            return (times[WEIGHT], WEIGHT) if WEIGHT in times else None
        order = (INPUT, FORWARD) if self.inputs_first else (FORWARD, INPUT)
        kind = min(others, key=lambda k: (others[k], order.index(k)))
        if WEIGHT in times and others[kind] > times[WEIGHT]:
            fits = times[WEIGHT] + self.costs.stages[s].weight <= others[kind] + 1e-12
            if fits or not self.keeps_gaps:
                return times[WEIGHT], WEIGHT
        full = self.done[s][FORWARD] < self.count and self.done[s][FORWARD] - self.done[s][WEIGHT] >= self.most
        if WEIGHT in times and full and self.early and kind == INPUT and FORWARD not in times:
            return times[WEIGHT], WEIGHT
        return others[kind], kind
