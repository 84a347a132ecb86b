"""Chooses what a rank's layers do about their saved tensors: as the user says, or so that a budget is kept.

A budget is of all that a rank's device holds in a training step (`predicted.py`). How many micro-batches a stage holds at once
follows from the schedule's lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.pipelines.pipeline import ONE, Pipeline
from holdall.pipelines.running.budget.predicted import RankBytes, RankPeak, Ways
from holdall.pipelines.running.budget.saved import KEEP, OFFLOAD, RECOMPUTE
from holdall.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from holdall.pipelines.running.mesh import PipeMesh

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
    place: Some = None  # layers whose optimizer states are at the host; with a budget: may be
    budget: int | None = None  # bytes of a rank
    may_recompute: bool = True  # for a budget, where nothing is said of it

    @staticmethod
    def of(recompute: Some, offload: Some, place: Some, budget: str | int | None, layers: int) -> Wishes:
        for name, some in (("recompute", recompute), ("offload", offload), ("place", place)):
            named(name, some, layers)
        most = None if budget is None else parse_bytes(budget)
        wishes = Wishes(recompute=recompute, offload=offload, place=place, budget=most)
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

    def to_place(self, layers: int) -> frozenset[int]:
        """Layers whose optimizer states shall be at the host, however much there is."""
        return frozenset() if self.budget is not None else named("place", self.place, layers)

    def permits(self, way: str, layer: int) -> bool:
        """May, or without a budget shall, a layer do so? With a budget, layers may be recomputed unless something else is
        said."""
        some = self.recompute if way == RECOMPUTE else self.offload
        if some is None:
            return way == RECOMPUTE and self.budget is not None and self.may_recompute
        return some if isinstance(some, bool) else layer in some

    def plainly(self, first: int, count: int) -> tuple[str, ...]:
        """Without a budget: the ways of the layers of a stage that begins at layer `first`."""
        each = range(first, first + count)
        return tuple(
            next((way for way in (RECOMPUTE, OFFLOAD) if self.permits(way, n)), KEEP) if self.budget is None else KEEP
            for n in each
        )


def check_wishes(wishes: Wishes, made: Pipeline, mesh: PipeMesh, optimizer: Any) -> Wishes:
    """Refuse what a schedule or a mesh does not do."""
    if made.weights != ONE and (wishes.recompute or wishes.offload):
        raise Unsupported(
            f"`{made.name}` computes with several versions of weights, and a recomputed layer would take the newest",
            hint="leave `recompute` and `offload` out, or use a schedule that flushes, such as 1f1b",
        )
    if wishes.place and (made.weights != ONE or not mesh.sharing.is_whole or mesh.dividing):
        raise Unsupported(
            "`place` keeps states of whole parameters at the host, and updates them between steps",
            hint='use shard="ddp", a mesh of `pp` and `dp`, and a schedule that flushes, such as 1f1b',
        )
    if wishes.budget is None:
        return wishes
    if mesh.dividing == "ep":
        raise Unsupported(
            "what a rank holds for its experts differs from batch to batch, so that no budget of it can be kept",
            hint="name the layers: recompute=True, or offload=[...]",
        )
    if optimizer is None:
        raise InvalidInput(
            "a budget is of the optimizer's states too, and nothing is known of them",
            hint="pass optimizer=lambda parameters: torch.optim.AdamW(parameters), and take it by pipe.optimizer()",
        )
    return replace(wishes, may_recompute=made.weights == ONE)


def chosen(
    wishes: Wishes, bytes_of: RankBytes | RankPeak, firsts: Mapping[int, int], counts: Mapping[int, int]
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
    wishes: Wishes, way: str, bytes_of: RankBytes | RankPeak, plain: Ways, firsts: Mapping[int, int]
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
    more = [f"{name}=True" for name, some in (("offload", wishes.offload), ("place", wishes.place)) if not some]
    raise Infeasible(
        f"a step of rank {rank} takes {format_bytes(need)} at least, more than {format_bytes(wishes.budget)}",
        hint=" or ".join([f"use a budget of {need:,} bytes or more, more micro-batches", *more]),
        smallest=need,
    )
