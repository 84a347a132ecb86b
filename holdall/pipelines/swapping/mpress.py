"""MPress (Zhou et al., HPCA 2023): what the early stages of a pipeline hold too much goes to the idle memory of later GPUs, to
the host, or is computed again. Simulated.

In 1F1B, stage s of p holds the activations of p - s micro-batches. For every tensor of a stage the planner chooses

    keep        it stays from forward to backward
    peer        it is cut into stripes and sent to GPUs with room, over all links to them at once, and fetched for the backward
    host        the same, over the GPU's one link to the host
    recompute   it is dropped, and computed again in the backward

by what each would cost beside the time from its forward to its backward: host memory where that is long enough, peers where it
is not, recomputation for the rest. An emulator plays the pipeline with these copies; while a GPU is over its memory, one more
of its tensors leaves, and at the end each choice is changed as long as that makes the step shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import inf

from holdall.errors import Infeasible
from holdall.pipelines.costs import PipeCosts
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.swapping.parked import (
    HOST,
    KEEP,
    PEER,
    RECOMPUTE,
    LinkedGpus,
    ParkedStep,
    TensorChoice,
    Tensors,
    emulate,
)
from holdall.pipelines.tasks import BACKWARD, FORWARD


def plan_mpress(pipeline: Pipeline, costs: PipeCosts, tensors: Tensors, server: LinkedGpus) -> ParkedStep:
    """The choices for a pipeline with one stage on each rank. `costs` has seconds and weights; its activations are not used.

    Raises `Infeasible` if some GPU stays over its memory.
    """
    search = _Search(pipeline, costs, tensors, server)
    search.fit()
    search.improve()
    return search.found


def map_stages(over: Sequence[int], spare: Sequence[int], peers: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Stage -> GPU, so that stages with too many bytes have the fastest links to those with room: the permutation with the most
    transferable bytes x rate, by trying all."""
    pairs = [(s, t, min(over[s], spare[t])) for s in range(len(over)) for t in range(len(over)) if min(over[s], spare[t]) > 0]

    def score(gpus: Sequence[int]) -> float:
        return sum(nbytes * peers[gpus[s]][gpus[t]] for s, t, nbytes in pairs)

    return max(permutations(range(len(over))), key=score)


class _Search:
    """Changes choices until every GPU fits, then while the step gets shorter."""

    def __init__(self, pipeline: Pipeline, costs: PipeCosts, tensors: Tensors, server: LinkedGpus) -> None:
        self._pipeline, self._costs, self._tensors, self._server = pipeline, costs, tensors, server
        self._gpus: tuple[int, ...] = tuple(range(pipeline.stages))
        self.choices = [[TensorChoice() for _ in own] for own in tensors]
        kept = self._emulated()
        self._least = kept.seconds  # of a step in which nothing is moved
        room = [server.memory - kept.peak[stage] for stage in range(pipeline.stages)]
        over = [max(0, -left) for left in room]
        self._gpus = map_stages(over, [max(0, left) for left in room], server.peers)
        self._lenders = {self._gpus[stage]: left for stage, left in enumerate(room) if left > 0}  # GPU -> bytes to lend
        self._flying = [_flying(kept, stage) for stage in range(pipeline.stages)]
        self._waits = [_waits(kept, stage) for stage in range(pipeline.stages)]
        self.found = self._emulated()

    def _emulated(self) -> ParkedStep:
        return emulate(self._pipeline, self._costs, self._tensors, self._server, self.choices, self._gpus)

    def fit(self) -> None:
        while True:
            excess = {stage: self.found.peak[gpu] - self._server.memory for stage, gpu in enumerate(self._gpus)}
            stage = max(excess, key=lambda s: excess[s])
            if excess[stage] <= 0:
                return
            if not (self._send_more(stage) or self._borrow_less(self._gpus[stage]) or self._reassign(stage)):
                raise Infeasible(
                    f"stage {stage} has {excess[stage]} bytes more than its GPU, and nothing is left to move",
                    hint="use more stages, or smaller micro-batches",
                )
            self.found = self._emulated()

    def _send_more(self, stage: int) -> bool:
        """Let the tensor go whose best way costs least for its bytes."""
        ranked = [
            (cost / self._tensors[stage][number].nbytes, rank, number, choice)
            for number, now in enumerate(self.choices[stage])
            if now.way == KEEP and self._tensors[stage][number].nbytes
            for rank, (cost, choice) in enumerate(self._ways(stage, number))
        ]
        if not ranked:
            return False
        _, _, number, choice = min(ranked, key=lambda entry: entry[:3])
        self.choices[stage][number] = choice
        return True

    def _borrow_less(self, gpu: int) -> bool:
        """Take one tensor that others have parked on a GPU away from there."""
        for stage, own in enumerate(self.choices):
            for number, choice in enumerate(own):
                if gpu in dict(choice.stripes):
                    self._lenders.pop(gpu, None)
                    ways = [(cost, c) for cost, c in self._ways(stage, number, instead=choice) if gpu not in dict(c.stripes)]
                    own[number] = min(ways, key=lambda entry: entry[0])[1] if ways else TensorChoice()
                    return True
        return False

    def _reassign(self, stage: int) -> bool:
        """Give a tensor of the stage another way, the one that leaves the fewest bytes over, if that are fewer than now."""
        own = self.choices[stage]
        least, best = self._over(self.found), None
        for number, now in enumerate(own):
            for _, choice in self._ways(stage, number, instead=now):
                own[number] = choice
                over = self._over(self._emulated())
                if over < least:
                    least, best = over, (number, choice)
            own[number] = now
        if best is None:
            return False
        own[best[0]] = best[1]
        return True

    def _over(self, outcome: ParkedStep) -> int:
        return sum(max(0, peak - self._server.memory) for peak in outcome.peak)

    def improve(self) -> None:
        """Try every other way for every tensor, as long as one makes the step shorter and fits."""
        better = True
        while better and self.found.seconds > self._least:
            better = False
            for stage, own in enumerate(self.choices):
                for number in range(len(own)):
                    best = own[number]
                    for choice in [TensorChoice(), *(c for _, c in self._ways(stage, number, instead=best))]:
                        own[number] = choice
                        tried = self._emulated()
                        if tried.seconds < self.found.seconds - 1e-12 and max(tried.peak) <= self._server.memory:
                            self.found, best, better = tried, choice, True
                    own[number] = best

    def _ways(self, stage: int, number: int, instead: TensorChoice | None = None) -> list[tuple[float, TensorChoice]]:
        """(seconds that a micro-batch would wait, choice), the paper's first choice first."""
        tensor, found = self._tensors[stage][number], []
        if self._server.host:
            load = sum(
                t.nbytes
                for t, c in zip(self._tensors[stage], self.choices[stage], strict=True)
                if c.way == HOST and c is not instead
            )
            found.append((self._exposed(stage, (load + tensor.nbytes) / self._server.host), TensorChoice(way=HOST)))
        stripes = self._striped(stage, tensor.nbytes, instead)
        if stripes:
            own = self._gpus[stage]
            slowest = max(self._parked(stage, gpu, instead) + nbytes / self._server.peers[own][gpu] for gpu, nbytes in stripes)
            found.append((self._exposed(stage, slowest), TensorChoice(way=PEER, stripes=stripes)))
        if tensor.again < inf:
            found.append((tensor.again, TensorChoice(way=RECOMPUTE)))
        return found

    def _exposed(self, stage: int, seconds: float) -> float:
        """Of a copy each way: they hide between forward and backward, and each behind the tasks of one micro-batch."""
        costs = self._costs.stages[stage]
        return max(0.0, 2 * seconds - self._waits[stage], seconds - (costs.forward + costs.backward))

    def _parked(self, stage: int, gpu: int, instead: TensorChoice | None) -> float:
        """Seconds that the stage's link to a GPU is busy for a micro-batch already."""
        rate = self._server.peers[self._gpus[stage]][gpu]
        return sum(dict(c.stripes).get(gpu, 0) for c in self.choices[stage] if c is not instead) / rate

    def _striped(self, stage: int, nbytes: int, instead: TensorChoice | None) -> tuple[tuple[int, int], ...]:
        """Parts of a tensor for all GPUs with room, by the rates of their links; none: there is too little room."""
        own, flying = self._gpus[stage], self._flying[stage]
        room = {gpu: left for gpu, left in self._lenders.items() if gpu != own and self._server.peers[own][gpu] > 0}
        for other, choices in enumerate(self.choices):
            for choice in choices:
                for gpu, part in choice.stripes if choice is not instead else ():
                    if gpu in room:
                        room[gpu] -= part * self._flying[other]
        left, parts = nbytes, dict.fromkeys(room, 0)
        while left:
            free = {gpu: room[gpu] // flying - parts[gpu] for gpu in room if room[gpu] // flying > parts[gpu]}
            if not free:
                return ()
            rates = {gpu: min(self._server.peers[own][gpu], 1e30) for gpu in free}  # free links are infinite
            for gpu, most in free.items():
                part = min(most, left, max(1, int(nbytes * rates[gpu] / sum(rates.values()))))
                parts[gpu] += part
                left -= part
        return tuple((gpu, part) for gpu, part in parts.items() if part)


def _flying(outcome: ParkedStep, stage: int) -> int:
    """The most micro-batches of a stage between forward and backward at once, of which parked bytes are held."""
    held = most = 0
    for span in sorted((s for s in outcome.spans if s.task.stage == stage), key=lambda s: s.start):
        held += 1 if span.task.kind == FORWARD else -1
        most = max(most, held)
    return most


def _waits(outcome: ParkedStep, stage: int) -> float:
    """Seconds from the end of a forward to the start of its backward, the least of all micro-batches."""
    ends = {s.task.batch: s.end for s in outcome.spans if (s.task.stage, s.task.kind) == (stage, FORWARD)}
    return min(s.start - ends[s.task.batch] for s in outcome.spans if (s.task.stage, s.task.kind) == (stage, BACKWARD))
