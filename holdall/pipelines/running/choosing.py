"""Chooses what a rank's layers do about their saved tensors: as the user says, or so that a budget is kept.

A budget is of the bytes that autograd holds on a rank (`saved.py`); weights, gradients and optimizer states come on top. How
many micro-batches a stage holds at once follows from the schedule, by `holding.py`, as for simulated pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.holding import holdings
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.running.saved import KEEP, OFFLOAD, RECOMPUTE, LayerSaves, StageBytes
from holdall.units import format_bytes, parse_bytes

Ways = dict[int, tuple[str, ...]]  # stage -> the way of each of its layers
Some = bool | Sequence[int] | None  # all, none, or some of the model's layers by number


def named(name: str, some: Some, layers: int) -> frozenset[int]:
    """The layers that an argument of this name means."""
    if some is None or isinstance(some, bool):
        return frozenset(range(layers) if some else ())
    wrong = [n for n in some if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < layers]
    if wrong:
        raise InvalidInput(
            f"`{name}` names layer {wrong[0]!r}, but the model's are 0 to {layers - 1}", hint=f"use {name}=True for all"
        )
    return frozenset(some)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What `start` was asked for."""

    recompute: Some = None
    offload: Some = None
    budget: int | None = None  # bytes of a rank

    @staticmethod
    def of(recompute: Some, offload: Some, budget: str | int | None, layers: int) -> Wishes:
        for name, some in (("recompute", recompute), ("offload", offload)):
            named(name, some, layers)
        most = None if budget is None else parse_bytes(budget)
        wishes = Wishes(recompute=recompute, offload=offload, budget=most)
        if most is None:
            both = [n for n in range(layers) if wishes.permits(RECOMPUTE, n) and wishes.permits(OFFLOAD, n)]
            if both:
                raise InvalidInput(
                    f"layer {both[0]} is to be both recomputed and offloaded", hint="name other layers, or give a `budget`"
                )
        return wishes

    @property
    def are_any(self) -> bool:
        return bool(self.recompute or self.offload) or self.budget is not None

    def permits(self, way: str, layer: int) -> bool:
        """May, or without a budget shall, a layer do so? With a budget, layers may be recomputed unless something else is
        said."""
        some = self.recompute if way == RECOMPUTE else self.offload
        if some is None:
            return way == RECOMPUTE and self.budget is not None
        return some if isinstance(some, bool) else layer in some

    def plainly(self, first: int, count: int) -> tuple[str, ...]:
        """Without a budget: the ways of the layers of a stage that begins at layer `first`."""
        each = range(first, first + count)
        return tuple(
            next((way for way in (RECOMPUTE, OFFLOAD) if self.permits(way, n)), KEEP) if self.budget is None else KEEP
            for n in each
        )


class RankBytes:
    """Predicts the most bytes that autograd holds on a rank. `saves`: by stage, what its layers save, the loss last where it is
    computed."""

    def __init__(self, made: Pipeline, rank: int, saves: Mapping[int, Sequence[LayerSaves]]) -> None:
        self._made, self._rank, self.saves = made, rank, saves

    def peak(self, ways: Ways) -> int:
        costs = [StageCosts()] * self._made.chain
        for stage, layers in self.saves.items():
            own = StageBytes(layers, [*ways[stage], *[KEEP] * (len(layers) - len(ways[stage]))])
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


def chosen(
    wishes: Wishes, bytes_of: RankBytes, firsts: Mapping[int, int], counts: Mapping[int, int]
) -> tuple[Ways | None, int]:
    """(the ways with the fewest layers that do not just keep, or None if none fits; the smallest peak that was found).

    Layers are changed one after another, each time the one that lowers the peak most. `firsts`, `counts`: of a stage's layers.
    """
    assert wishes.budget is not None
    plain: Ways = {stage: (KEEP,) * counts[stage] for stage in counts}
    rows = [_sequence(wishes, way, bytes_of, plain, firsts) for way in (RECOMPUTE, OFFLOAD)]
    smallest = bytes_of.peak(plain)
    if smallest <= wishes.budget:
        return plain, smallest
    while rows:
        for row in list(rows):
            found = next(row, None)
            if found is None:
                rows.remove(row)
                continue
            ways, peak = found
            smallest = min(smallest, peak)
            if peak <= wishes.budget:
                return ways, smallest
    return None, smallest


def _sequence(
    wishes: Wishes, way: str, bytes_of: RankBytes, plain: Ways, firsts: Mapping[int, int]
) -> Iterator[tuple[Ways, int]]:
    ways = dict(plain)
    left = [(s, n) for s in ways for n in range(len(ways[s])) if wishes.permits(way, firsts[s] + n)]
    while left:
        tried = []
        for stage, n in left:
            changed = {**ways, stage: (*ways[stage][:n], way, *ways[stage][n + 1 :])}
            layer = bytes_of.saves[stage][n]
            freed = sum(layer.saved.values()) - sum(layer.held(way).values())
            tried.append((bytes_of.peak(changed), -freed, stage, n, changed))
        peak, _, stage, n, ways = min(tried, key=lambda entry: entry[:4])
        left.remove((stage, n))
        yield ways, peak


def refuse_together(wishes: Wishes, fits: bool, smallest: int) -> None:
    """Refuse, on all ranks, a budget that one of them cannot keep."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (fits, smallest))
    if all(told[0] for told in said):
        return
    assert wishes.budget is not None
    rank, need = max(((rank, told[1]) for rank, told in enumerate(said) if not told[0]), key=lambda found: found[1])
    raise Infeasible(
        f"the layers of rank {rank} have autograd hold {format_bytes(need)} at least, more than {format_bytes(wishes.budget)}",
        hint=f"use a budget of {need:,} bytes or more, more micro-batches, or let layers be offloaded: offload=True",
        smallest=need,
    )
