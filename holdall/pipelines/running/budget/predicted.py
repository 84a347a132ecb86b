"""Predicts what a rank of a pipeline holds at most in a step, from trials of its stages and the order of its list.

`RankBytes` is of what autograd holds, to the byte. `RankPeak` is of all memory of the rank's device:

    weights      parameters and buffers of its stages, in as many versions as the schedule has
    batch        the inputs and targets that `step` gets
    messages     a buffer for every message that comes, which torch keeps from the first step on; what is sent stays until the
                 end of a step
    saved        what autograd holds, what a stage hands on, and the most that a layer needs for a while besides
    gradients    from the first backward of a stage on, and what it takes to add them up over ranks
    states       of the optimizer, and what an update needs for a while

What a layer needs for a while is the same in every micro-batch but the first of a stage, whose backward makes gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.holding import WeightVersions, holdings
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.running.budget.saved import KEEP, OFFLOAD, RECOMPUTE
from holdall.pipelines.running.budget.trial import LayerSaves, StageTrial
from holdall.pipelines.tasks import BACKWARD, FORWARD, INPUT, RECV_B, RECV_F, UPDATE, WEIGHT, PipeTask

_SCALAR = 8
Ways = dict[int, tuple[str, ...]]  # stage -> the way of each of its layers


class StageBytes:
    """Bytes that one micro-batch has autograd hold on a stage, by the ways of its layers."""

    def __init__(self, layers: Sequence[LayerSaves], ways: Sequence[str]) -> None:
        each = list(zip(layers, ways, strict=True))
        held: list[dict[Any, int]] = [layer.held(way) for layer, way in each]
        made: list[dict[Any, int]] = [layer.made(way) for layer, way in each]
        leaving: list[dict[Any, int]] = [layer.saved if way == OFFLOAD else {} for layer, way in each]
        left = [layer.left(way, over=False) for layer, way in each]
        before = [_union(held[: n + 1]) for n in range(len(layers))]
        self.after = _total(before[-1])
        self.in_forward = max(_total(b | leaving[n]) for n, b in enumerate(before))
        self.in_backward = max(_total(b | made[n]) for n, b in enumerate(before))
        self.in_input = max(_total(b | made[n] | _union(left[n + 1 :])) for n, b in enumerate(before))
        self.for_weight = _total(_union([layer.left(way, over=True) for layer, way in each]))


class RankBytes:
    """Predicts the most bytes that autograd holds on a rank. `saves`: by stage, what its layers save, the loss last where it is
    computed."""

    def __init__(self, made: Pipeline, rank: int, saves: Mapping[int, Sequence[LayerSaves]]) -> None:
        self._made, self._rank, self.saves = made, rank, saves

    def peak(self, ways: Ways) -> int:
        costs = [StageCosts()] * self._made.chain
        for stage, layers in self.saves.items():
            own = StageBytes(layers, all_ways(layers, ways[stage]))
            is_first = self._made.before(stage) is None  # torch computes all of its backward in `W`
            costs[stage % self._made.chain] = StageCosts(
                activations=own.after,
                in_forward=own.in_forward,
                in_backward=own.in_backward,
                in_input=0 if is_first else own.in_input,
                for_weight=own.after if is_first else own.for_weight,
                in_weight=own.in_backward if is_first else own.for_weight,
            )
        return holdings(self._made, self._made.lists, PipeCosts(stages=tuple(costs)))[self._rank].bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Bytes of a rank besides those of its micro-batches."""

    weights: int
    batch: int
    states: int  # of the optimizer, on the device
    updating: int  # what an update needs for a while
    reducing: int = 0  # what it takes to add gradients up over ranks, or to clip them
    earlier: int = 0  # gradients that are there before the step
    gathered: int = 0  # shards of parameters as whole ones, in forward and backward
    scattered: int = 0  # of gradients, that are gone when they are in shards
    in_advance: bool = True  # are there buffers for all messages? Else each has its own when it comes


class RankPeak:
    """Predicts the most bytes of a rank's device. `saves`: as of `RankBytes`."""

    def __init__(
        self, made: Pipeline, rank: int, lists: Sequence[Sequence[PipeTask]], trials: Mapping[int, StageTrial], around: Around
    ) -> None:
        """`lists`: with messages."""
        self._made, self._rank, self._trials, self._around = made, rank, trials, around
        self._works = [work for task in lists[rank] for work in task.works]
        self._walked: dict[Any, tuple[int, int]] = {}
        self._needs: dict[Any, StageNeeds] = {}
        self.saves = {stage: trial.layers for stage, trial in trials.items()}

    def with_states(self, states: int, updating: int) -> RankPeak:
        """The same rank with other optimizer states on its device."""
        other = copy.copy(self)
        other._around = replace(self._around, states=states, updating=updating)
        return other

    def peak(self, ways: Ways) -> int:
        return max(self.parts(ways).values())

    def parts(self, ways: Ways) -> dict[str, int]:
        """The most bytes in each part of a training step."""
        around = self._around
        most, after = (around.states + nbytes for nbytes in self._walk(ways))
        return {
            "forward and backward": most + around.gathered,
            "adding up gradients": after + around.gathered + around.reducing,
            "update": after - around.scattered - around.earlier + around.updating,
        }

    def _walk(self, ways: Ways) -> tuple[int, int]:
        """(the most in forward and backward, what is there afterwards), without the states."""
        key = tuple(sorted(ways.items()))
        if key not in self._walked:
            walk = _Walk(self._made, self._around, {s: self._stage(s, ways[s]) for s in self._trials})
            for work in self._works:
                walk.do(work)
            self._walked[key] = walk.most, walk.end()
        return self._walked[key]

    def _stage(self, stage: int, ways: Sequence[str]) -> StageNeeds:
        key = stage, tuple(ways)
        if key not in self._needs:
            self._needs[key] = self._needed(stage, ways)
        return self._needs[key]

    def _needed(self, stage: int, ways: Sequence[str]) -> StageNeeds:
        trial, own = self._trials[stage], self._made.stages_of(self._rank)
        before, after = self._made.before(stage), self._made.after(stage)
        ends = _Ends(
            is_first=before is None,
            is_last=after is None,
            from_other=before not in (None, *own),
            to_other=after not in (None, *own),
            in_advance=self._around.in_advance,
        )
        return StageNeeds(trial, all_ways(trial.layers, ways), ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Where a stage gets what it computes on, and where its results go."""

    is_first: bool
    is_last: bool
    from_other: bool  # messages of another rank come
    to_other: bool
    in_advance: bool  # as in `Around`


class StageNeeds:
    """Bytes of one micro-batch of a stage, whatever holds them; of `forward` from its beginning, else all."""

    def __init__(self, trial: StageTrial, ways: Sequence[str], ends: _Ends) -> None:
        self.is_first, self.gradients, self.weights = ends.is_first, trial.gradients, trial.weights
        local = ends.in_advance and not ends.is_last and not ends.to_other  # the next stage's buffer has what this one hands on
        self._elsewhere: set[Any] = set(trial.outputs) if local else set()
        each = list(zip(trial.layers, ways, strict=True))
        held: list[dict[Any, int]] = [layer.held(way) for layer, way in each]
        prefix = [_union(held[:n]) for n in range(len(held) + 1)]
        copies = [sum(layer.passing.copied for layer, way in each[:n] if way == RECOMPUTE) for n in range(len(held) + 1)]
        later = [sum(layer.passing.trained for layer, _ in each[n:]) for n in range(1, len(held) + 1)]
        left = [layer.left(way, over=False) for layer, way in each]
        out = trial.outputs

        def again(n: int) -> int:
            """Its forward once more, beside the gradient of its output."""
            layer, way = each[n]
            return layer.passing.gradient + layer.passing.forward if way == RECOMPUTE else 0

        def back(n: int, more: int, before: int, rest: Sequence[dict[Any, int]] = ()) -> int:
            there = _union([prefix[n + 1], *rest, out])
            made = each[n][0].made(each[n][1])
            return copies[-1 if rest else n + 1] + max(self._total(there | made) + more, self._total(there) + again(n) + before)

        layers = range(len(each))
        self.forward = max(
            self._total(prefix[n] | layer.inputs) + copies[n]
            + (layer.passing.again if way == RECOMPUTE else layer.passing.forward)
            for n, (layer, way) in enumerate(each)
        )  # fmt: skip
        self.after = self._total(prefix[-1] | out) + copies[-1]
        self.first = max(back(n, trial.layers[n].passing.first, later[n]) for n in layers)
        self.backward = max(back(n, trial.layers[n].passing.backward, 0) for n in layers)
        self.in_input = max(back(n, trial.in_input, 0, left[n + 1 :]) for n in layers)
        kept = _union([layer.left(way, over=True) for layer, way in each])
        self.for_weight = self._total(kept | trial.ends) + trial.captured + copies[-1]
        self.in_weight, self.first_weight = (self.for_weight + more for more in (trial.in_weight, trial.first_weight))
        self.sent = sum(out.values()) if ends.to_other else 0  # until the end of a step
        self.returned = trial.returned if ends.from_other or not (ends.in_advance or ends.is_first) else 0
        self.loss = _SCALAR if ends.is_last else 0
        self.received, self.answered = trial.received, trial.answered
        self.buffers = (0 if ends.is_first else trial.received) + (0 if ends.is_last else trial.answered)
        self.freed = (
            0 if ends.in_advance else (trial.received if ends.from_other else 0) + (0 if ends.is_last else trial.answered)
        )

    def _total(self, held: Mapping[Any, int]) -> int:
        return sum(nbytes for key, nbytes in held.items() if key not in self._elsewhere)


class _Walk:
    """The bytes of a rank, work by work."""

    def __init__(self, made: Pipeline, around: Around, stages: Mapping[int, StageNeeds]) -> None:
        self._around, self._stages = around, stages
        self._versions = {stage: WeightVersions(made) for stage in stages}
        self._begun: set[int] = set()  # stages that have gradients
        self._sent = 0  # bytes that stay until the end of a step
        losses = made.micro_batches * sum(own.loss for own in stages.values())
        self.now = around.weights + around.batch + around.earlier + losses
        if around.in_advance:
            self.now += made.micro_batches * sum(own.buffers for own in stages.values())
        self.most = self.now

    def _look(self, more: int = 0) -> None:
        copies = sum((self._versions[stage].count - 1) * own.weights for stage, own in self._stages.items())
        self.most = max(self.most, self.now + copies + more)

    def do(self, work: PipeTask) -> None:
        own, stage = self._stages[work.stage], work.stage
        if work.kind in (RECV_F, RECV_B) and not self._around.in_advance:
            self.now += own.received if work.kind == RECV_F else own.answered
        elif work.kind == FORWARD:
            self._versions[stage].forward(work.batch)
            self._look(own.forward)
            self.now += own.after
        elif work.kind == INPUT and not own.is_first:  # torch computes all of the first stage's backward in `W`
            self._look(own.in_input - own.after)
            self.now += own.for_weight - own.after + own.returned  # which torch keeps until the next step
        elif work.kind == WEIGHT and not own.is_first:
            self._look((own.in_weight if stage in self._begun else own.first_weight) - own.for_weight)
            self._end(own.for_weight, stage)
        elif work.kind in (BACKWARD, WEIGHT):
            self._look((own.backward if stage in self._begun else own.first) - own.after)
            self._keep(own.returned)
            self._end(own.after + own.freed, stage)
            self._versions[stage].backward(work.batch)
        elif work.kind == UPDATE:
            self._versions[stage].update()
            self._look(self._around.updating)
            self._begun.discard(stage)
            self.now -= own.gradients
        self._look()

    def _keep(self, nbytes: int) -> None:
        self._sent += nbytes
        self.now += nbytes

    def _end(self, nbytes: int, stage: int) -> None:
        """A micro-batch is over on a stage."""
        own = self._stages[stage]
        self.now -= nbytes
        self._keep(own.sent)
        if stage not in self._begun:
            self._begun.add(stage)
            self.now += own.gradients

    def end(self) -> int:
        return self.now - self._sent


def all_ways(layers: Sequence[LayerSaves], ways: Sequence[str]) -> tuple[str, ...]:
    """The loss, if it is one of the layers, just keeps."""
    return (*ways, *[KEEP] * (len(layers) - len(ways)))


def _union(sets: Sequence[dict[Any, int]]) -> dict[Any, int]:
    return {key: nbytes for one in sets for key, nbytes in one.items()}


def _total(held: Mapping[Any, int]) -> int:
    return sum(held.values())
