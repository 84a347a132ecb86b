"""Periodic allocation (Imanishi & Xu, ISMM 2024): a local search over the order in which tensors are placed.

    plan     -> an order; each tensor goes to the lowest offset that is free during its lifetime
    seeds    -> by size, by size times length, by length, by the offsets of best fit: the best one begins
    move     -> a chain of tensors, each resting on the next, holds up the highest one; one of them goes to an earlier place
    accept   -> never worse, or worse with a probability that falls to 0
    stop     -> at the lower bound, or after `moves`

The paper's text was not at hand: the statement of the problem is its own, the search is a reconstruction. Only the largest
tensors are searched over; the others are placed after them, where there are gaps enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from holdall.layouts.best_fit import BestFit
from holdall.packing import LaidOut
from holdall.packing.gaps import Gaps, place_in_order
from holdall.packing.orders import by_area, by_length, by_size, laid_out, lay_ground
from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes

_OFTEN = 10  # moves between two trials of all tensors, while the large ones alone are within the bound
_HEAT = 0.01  # share of the lower bound by which a move may be worse, at first


@dataclass(frozen=True, kw_only=True)
class Imanishi:
    """Local search over placement orders, for steps that repeat."""

    moves: int = 1000
    largest: int = 160  # tensors that are searched over
    seed: int = 0

    name: ClassVar[str] = "imanishi"
    paper: ClassVar[str] = "Imanishi & Xu, ISMM 2024"
    is_static: ClassVar[bool] = True

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        offsets, others, floor = lay_ground(lifetimes)
        best = min(self._seeds(lifetimes, others, floor), key=lambda gaps: gaps.height)
        moves = 0
        if best.height > lifetimes.load:
            search = _Search(lifetimes, floor, by_size(lifetimes, others), self.largest, best)
            moves = search.run(self.moves, Random(self.seed))
            best = search.best
        return laid_out(lifetimes, offsets | best.offsets, moves=moves)

    def _seeds(self, lifetimes: StepLifetimes, others: list[int], floor: Bytes) -> Iterator[Gaps]:
        """Tensors in good orders, up to the first that reaches the lower bound."""
        for order in (by_size, by_area, by_length):
            for tight in (True, False):
                gaps = place_in_order(lifetimes, order(lifetimes, others), floor=floor, tight=tight)
                yield gaps
                if gaps.height <= lifetimes.load:
                    return
        fitted = BestFit()(lifetimes).offsets
        assert fitted is not None
        yield place_in_order(lifetimes, sorted(others, key=lambda n: (fitted[n], n)), floor=floor)


class _Search:
    def __init__(self, lifetimes: StepLifetimes, floor: Bytes, others: list[int], largest: int, best: Gaps) -> None:
        self._lifetimes, self._floor, self.best = lifetimes, floor, best
        self._rest = others[largest:]
        core = set(others[:largest])
        self._order = [n for n in best.offsets if n in core]  # in the order in which the best seed placed them
        self._now = place_in_order(lifetimes, self._order, floor=floor)
        self._try_all(self._now)

    def run(self, moves: int, rng: Random) -> int:
        """Make at most so many moves; returns how many were made."""
        bound = self._lifetimes.load
        lowest = self._now.height
        for made in range(moves):
            if self.best.height <= bound or self._now.height <= self._floor:
                return made
            chain = self._chain(rng)
            chosen = rng.choice(chain)
            at = self._order.index(chosen)
            if at == 0:
                continue
            to = rng.randrange(at)
            order = [*self._order[:to], chosen, *self._order[to:at], *self._order[at + 1 :]]
            moved = self._again(order, to)
            worse = moved.height - self._now.height
            heat = _HEAT * bound * (1 - made / moves)
            if worse <= 0 or (heat > 0 and rng.random() < math.exp(-worse / heat)):
                self._order, self._now = order, moved
                if moved.height < lowest or (moved.height <= bound and made % _OFTEN == 0):
                    lowest = min(lowest, moved.height)
                    self._try_all(moved)
        return moves

    def _again(self, order: list[int], since: int) -> Gaps:
        """Place an order whose first `since` tensors stay where they are."""
        gaps = Gaps(self._lifetimes, floor=self._floor)
        gaps.put_all({n: self._now.offsets[n] for n in order[:since]})
        for number in order[since:]:
            gaps.place(number)
        return gaps

    def _try_all(self, core: Gaps) -> None:
        """Place the small tensors after the large ones; keep the result if it is the lowest."""
        if core.height >= self.best.height:
            return
        gaps = Gaps(self._lifetimes, floor=self._floor)
        gaps.put_all(core.offsets)
        for number in self._rest:
            gaps.place(number, tight=True)
            if gaps.height >= self.best.height:
                return
        self.best = gaps

    def _chain(self, rng: Random) -> list[int]:
        """Tensors that rest on each other, from one at the top to one on the floor."""
        tensors, offsets = self._lifetimes.tensors, self._now.offsets
        top = self._now.height
        by_top: dict[Bytes, list[int]] = {}
        for number, offset in offsets.items():
            by_top.setdefault(offset + tensors[number].size, []).append(number)
        at = rng.choice(by_top[top])
        chain = [at]
        while offsets[at] > self._floor:
            at = rng.choice([n for n in by_top[offsets[at]] if self._meet(n, at)])
            chain.append(at)
        return chain

    def _meet(self, one: int, other: int) -> bool:
        """Are two tensors ever alive together?"""
        period, tensors = self._lifetimes.period, self._lifetimes.tensors
        spans = tensors[other].spans(period)
        return any(b < end and begin < e for begin, end in tensors[one].spans(period) for b, e in spans)
