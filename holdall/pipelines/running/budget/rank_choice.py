"""What a rank of a pipeline does about its layers, by trials of its stages, and what it is predicted to hold then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from holdall.pipelines.lowering import lower
from holdall.pipelines.running.budget.choosing import chosen, named
from holdall.pipelines.running.budget.metering import bytes_besides
from holdall.pipelines.running.budget.predicted import Around, RankBytes, RankPeak, Ways
from holdall.pipelines.running.budget.rule_bytes import RuleBytes
from holdall.pipelines.running.budget.trial import StageTrial, try_stage
from holdall.pipelines.running.clipping import clipping
from holdall.pipelines.running.host.states import parameters_of
from holdall.pipelines.running.stage_ranks.sharing import DDP, ZERO3
from holdall.pipelines.tasks import INPUT
from holdall.runtime.budget.meter import bytes_outside
from holdall.sharded import local_of
from holdall.units import PAGE

if TYPE_CHECKING:
    from holdall.pipelines.running.starting import PipePlan

_COUNTERS = 1024  # bytes that `fully_shard` has of its own
_SPREAD = 1.04  # what a GPU's allocator reserves for what is live: pages are free in part,
_PAGES = 2 * PAGE  # the last ones most
Modules = Mapping[int, torch.nn.Module]


class RankChoice:
    """`ways`: stage -> the way of each layer. `predicted`: the most bytes that autograd will hold on the rank; None: no sample
    was given. `parts`: the most bytes of tensors in each part of a training step; empty: the optimizer is not known. `place`:
    layers whose optimizer states are at the host. `fits`: does the budget do? If not, `smallest` would."""

    def __init__(
        self, plan: PipePlan, modules: Mapping[int, torch.nn.Module], rank: int, before: Sequence[Any] | None, loss: Any
    ) -> None:
        """`modules`: stage -> its layers; `rank`: of the pipeline. `before`: what every piece gets in a forward of the sample;
        None: there is no sample."""
        self._plan, self._modules, self._rank = plan, modules, rank
        self._wishes, self.fits, self.smallest = plan.wishes, True, 0
        self.predicted: int | None = None
        self.parts: dict[str, int] = {}
        self._firsts = {stage: plan.cut(stage)[0] for stage in modules}
        self._counts = {stage: len(list(module.children())) for stage, module in modules.items()}
        self.ways: Ways = {stage: self._wishes.plainly(self._firsts[stage], self._counts[stage]) for stage in modules}
        self.place = plan.wishes.to_place(len(plan.pieces))
        self._trials: dict[int, StageTrial] = {}
        self._besides = 0
        is_gpu = plan.device.type == "cuda"
        self._spread, self._pages = _SPREAD if is_gpu else 1.0, _PAGES if is_gpu else 0
        if before is not None and plan.sample is not None:
            self._trials = {stage: self._try(stage, before, loss) for stage in modules}
            known = [t for t in tree_leaves((before, plan.sample)) if isinstance(t, torch.Tensor)]
            self._besides = bytes_besides([*self._there(), *known], plan.device)  # the trials have made workspaces
            self._choose()

    def _try(self, stage: int, before: Sequence[Any], loss: Any) -> StageTrial:
        plan, made = self._plan, self._plan.made
        assert plan.sample is not None
        inputs = _as_received(before[self._firsts[stage]], is_first=made.before(stage) is None)
        targets = plan.mesh.rows(plan.sample)[1]
        ends = (loss, targets) if made.after(stage) is None else (None, None)
        tasks = made.lists[self._rank]
        in_two = made.before(stage) is not None and any(w.kind == INPUT for t in tasks for w in t.works)
        return try_stage(
            self._modules[stage], inputs, plan.device, *ends, in_two=in_two, with_backward=plan.optimizer is not None
        )

    def _choose(self) -> None:
        """By all that the device holds, where the optimizer is known."""
        made, wishes = self._plan.made, self._wishes
        self._held = RankBytes(made, self._rank, {stage: trial.layers for stage, trial in self._trials.items()})
        self._rule: RuleBytes | None = None
        if self._plan.optimizer is not None:
            self._rule = RuleBytes(self._plan.optimizer, _parameters(self._modules), self._shares)
            self._peak = RankPeak(made, self._rank, lower(made), self._trials, self._around())
            for place in self._placings(self._rule):
                self.place = place
                if wishes.budget is None or self._is_chosen(self._peak.with_states(*self._rule.on_device(self._placed()))):
                    break
        self.predict()

    def predict(self) -> None:
        """What the ways and the places make of it."""
        self.predicted = self._held.peak(self.ways)
        if self._rule is not None:
            self.parts = self._peak.with_states(*self._rule.on_device(self._placed())).parts(self.ways)

    def _is_chosen(self, whole: RankPeak) -> bool:
        """Does the budget do? Takes the ways in which it does."""
        assert self._wishes.budget is not None
        room = int((self._wishes.budget - self.budget_for(0)) / self._spread)
        found, smallest = chosen(replace(self._wishes, budget=room), whole, self._firsts, self._counts)
        self.fits, self.ways, self.smallest = found is not None, found or self.ways, self.budget_for(smallest)
        return self.fits

    def budget_for(self, nbytes: int) -> int:
        """The budget that tensors of so many bytes need."""
        return bytes_outside(self._plan.device) + self._besides + self._pages + round(nbytes * self._spread)

    def _placings(self, rule: RuleBytes) -> Iterator[frozenset[int]]:
        """Layers to place: those that the user says, or with a budget none, and then one more each time, the largest first."""
        yield self.place
        if self._wishes.budget is None:
            return
        left = parameters_of(named("place", self._wishes.place, len(self._plan.pieces)), self._by_first())
        for n in sorted(left, key=lambda n: -rule.large(left[n])):
            if left[n]:
                yield self.place | {n}

    def _placed(self) -> set[int]:
        layers = parameters_of(self.place, self._by_first())
        return {id(p) for own in layers.values() for p in own}

    def _by_first(self) -> dict[int, torch.nn.Module]:
        return {self._firsts[stage]: module for stage, module in self._modules.items()}

    def _around(self) -> Around:
        plan, shares = self._plan, self._shares
        assert plan.sample is not None
        there = self._there()
        trained = [p for p in _parameters(self._modules) if p.requires_grad]
        whole = [p for p in trained if id(p) not in shares]
        pieces = [self._shards(piece) for m in self._modules.values() for piece in m.children()]
        largest = max(pieces, key=lambda piece: piece.whole, default=_Shards())
        scattered = sum(piece.whole - piece.parts for piece in pieces)
        return Around(
            weights=_distinct(there) - scattered + (_COUNTERS if scattered else 0),
            batch=_distinct(plan.sample),  # of which it is a part
            states=0,
            updating=0,
            reducing=max(plan.mesh.reducing(whole, plan.made, plan.tied), largest.whole + largest.parts, clipping(trained)),
            earlier=_distinct(trained) - scattered if plan.accumulate > 1 else 0,
            in_advance=plan.mesh.in_advance,
            gathered=self._gathered() + (largest.whole if self._again else 0),
            scattered=scattered,
        )

    def _there(self) -> list[torch.Tensor]:
        return [t for m in self._modules.values() for t in (*m.parameters(), *m.buffers())]

    @cached_property
    def _shares(self) -> dict[int, float]:
        """The part of a parameter, by its identity, that this rank has between steps, where that is not all of it."""
        ranks, found = self._plan.mesh.sizes["dp"], {}
        for piece, way in self._ways_to_share():
            for p in piece.parameters() if way != DDP else ():
                rows = local_of(p).shape[0] if p.dim() else 1
                found[id(p)] = -(-rows // ranks) / max(1, rows)
        return found

    def _ways_to_share(self) -> list[tuple[torch.nn.Module, str]]:
        of = self._plan.mesh.sharing.of
        pairs = (zip(m.children(), of(*self._plan.cut(s)), strict=True) for s, m in self._modules.items())
        return [pair for own in pairs for pair in own]

    def _shards(self, piece: torch.nn.Module) -> _Shards:
        own = [p for p in piece.parameters() if id(p) in self._shares]
        return _Shards(sum(local_of(p).nbytes for p in own), round(sum(local_of(p).nbytes * self._shares[id(p)] for p in own)))

    @property
    def _again(self) -> bool:
        """Are parameters gathered for every micro-batch?"""
        return any(way == ZERO3 for _, way in self._ways_to_share())

    def _gathered(self) -> int:
        """The most bytes of whole parameters that are gathered at once: of all pieces that keep them for a step, and of those
        of one stage that gather them again."""
        stays = sum(self._shards(piece).whole for piece, way in self._ways_to_share() if way != ZERO3)
        again = dict.fromkeys(self._modules, 0)
        for stage, module in self._modules.items():
            ways = self._plan.mesh.sharing.of(*self._plan.cut(stage))
            again[stage] = sum(self._shards(m).whole for m, way in zip(module.children(), ways, strict=True) if way == ZERO3)
        return stays + max(again.values(), default=0)


class _Shards(NamedTuple):
    """Bytes of a piece's parameters that are in shards."""

    whole: int = 0
    parts: int = 0  # of this rank


def _parameters(modules: Modules) -> list[torch.nn.Parameter]:
    """Each once."""
    return list(torch.nn.ModuleList(modules.values()).parameters())


def _distinct(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of their storages."""
    storages = (local_of(t).untyped_storage() for t in tensors)
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def _as_received(value: Any, *, is_first: bool) -> Any:
    """What a stage gets, with gradients where a stage before it wants them."""

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.is_floating_point() and not is_first)

    return torch.utils._pytree.tree_map_only(torch.Tensor, own, value)
