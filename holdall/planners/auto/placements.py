"""Placements of model states, from everything on the device to everything on the host.

Three numbers are chosen: units updated on the device (the first ones, which the next forward needs first), units with streamed
weights among the others, and which of the units updated elsewhere are updated by the host and which via the device. The last
follows from the rates: each unit goes where its update would be done first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from holdall.actions.place import Place, streamable
from holdall.actions.place.schedule import read_by_hand
from holdall.cost.updates import host_seconds
from holdall.planning.finish import NEVER
from holdall.types import Problem, Unit

_GUESSES = 2  # guesses in a row that may approach from one side only
_TINY = 1e-3  # share of all parameters below which a unit is not worth moving


@dataclass(frozen=True, slots=True)
class PlacementShape:
    """(units updated on the device, units with streamed weights), the first units in both."""

    device: int
    streamed: int
    via_device: bool = True  # allow updates via the device, which take device memory
    overlap_forward: bool = False  # updates overlap the next forward, instead of blocking in backward
    overlap: bool = True  # copies of weights and gradients overlap computation, which takes memory too


class Placements:
    """The placements of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        trace = problem.trace
        total = sum(trace.tensors[x].nbytes for u in trace.units for x in u.weights) or 1
        can = streamable(trace)
        by_hand = read_by_hand(trace)
        large = [
            u for u in trace.units if u.name not in by_hand and sum(trace.tensors[x].nbytes for x in u.weights) > _TINY * total
        ]
        self.movable = [u for u in large if u.numel or u.name in can]
        self.streamable = [u for u in self.movable if u.name in can]
        is_narrow = trace.about.precision is not None  # then weights can be cast from masters on the device
        self.castable = [u for u in self.streamable if is_narrow and 0 < len(u.grads) == len(u.weights)]
        sizes = sorted(u.numel for u in self.movable) or [0]
        self._common = sizes[len(sizes) // 2]  # much larger units would enlarge the slots of all

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of states, gradients and weights of the first n movable units, for n from 0 to all."""
        tensors = self.problem.trace.tensors
        return [0, *accumulate(sum(tensors[x].nbytes for x in (*u.states, *u.grads, *u.weights)) for u in self.movable)]

    @property
    def is_possible(self) -> bool:
        p = self.problem
        return p.permits(Place) and p.hardware.far is not None and bool(self.movable)

    @property
    def when(self) -> str:
        """The time of updates: as early as the loop's use of gradients permits."""
        p = self.problem
        if not p.reads_gradients and p.accumulate == 1:
            return "backward"
        return "overlap_forward" if p.hardware.overlap else "step"

    def passing(self, spread: PlacementShape) -> list[PlacementShape]:
        """The variants of this placement with updates via the device."""
        can_overlap = self.when == "backward" and self.problem.hardware.overlap
        return [
            replace(spread, via_device=True, overlap_forward=overlap_forward)
            for overlap_forward in (False, True)[: 1 + can_overlap]
        ]

    def at(self, spread: PlacementShape) -> Place:
        stay = {u.name for u in self.movable[: spread.device]}
        rest = [u for u in self.movable if u.name not in stay]
        cast = [u for u in self.castable if u.name in stay][: spread.streamed]
        candidates = [u for u in rest if u.name in {s.name for s in self.streamable}]
        streamed = {u.name for u in _evenly(candidates, spread.streamed - len(cast))}
        rows = {u.name: ("streamed", "device") for u in cast}
        host = link = 0.0
        for unit in rest:
            weights = "streamed" if unit.name in streamed else "resident"
            if not unit.numel:
                rows[unit.name] = (weights, "device")
                continue
            by_host, by_link = host + self._host_seconds(unit, spread), link + self._link_seconds(unit)
            is_via_device = spread.via_device and self._may_pass(unit, weights) and by_link < by_host
            rows[unit.name] = (weights, "via_device" if is_via_device else "host")
            host, link = (host, by_link) if is_via_device else (by_host, link)
        share = self.problem.accumulate == 1
        when = "overlap_forward" if spread.overlap_forward else self.when
        return Place.of(self.problem.trace, rows, when=when, share=share, overlap=spread.overlap)

    def _may_pass(self, unit: Unit, weights: str) -> bool:
        is_narrow = self.problem.trace.about.precision is not None
        can = weights == "resident" or is_narrow or len(unit.grads) == len(unit.weights)
        return self.problem.hardware.overlap and can and unit.numel <= 2 * self._common

    def _host_seconds(self, unit: Unit, spread: PlacementShape) -> float:
        return host_seconds(unit, self.problem.trace, self.problem.hardware, beside=spread.via_device)

    def _link_seconds(self, unit: Unit) -> float:
        """Seconds of the link for one unit: its states and gradient come in while others go out."""
        hardware, tensors = self.problem.hardware, self.problem.trace.tensors
        assert hardware.far is not None
        moved = sum(tensors[x].nbytes for x in (*unit.states, *unit.grads))
        return moved / (hardware.far.read * hardware.duplex)


def _evenly(units: list[Unit], count: int) -> list[Unit]:
    """`count` of the units, evenly spread."""
    count = min(count, len(units))
    return [units[i * len(units) // count] for i in range(count)] if count else []


class Guesses:
    """Finds how many units fit with few simulations: bytes grow about in proportion to the units' sizes."""

    def __init__(self) -> None:
        self._rate = 1.0  # measured growth over expected growth; the same for all placements

    def most_that_fit(self, excess: Callable[[int], int], sizes: Sequence[int], begin: int = 0) -> int | None:
        """The largest count, from `begin` on, whose excess of bytes is at most 0; None: even `begin` exceeds.

        `sizes`: bytes for 0, 1, 2, ... units. `excess` grows with the count, and is expensive to compute.
        """
        low, up = begin, len(sizes)  # the largest count known to fit, the smallest known not to
        at_low = excess(begin)
        if at_low > 0:
            return None
        since = 0  # guesses since the range last halved
        while up - low > 1:
            guess = bisect_right(sizes, sizes[low] - at_low / self._rate) - 1
            guess = (low + up) // 2 if since > _GUESSES else min(max(guess, low + 1), up - 1)
            since = 0 if since > _GUESSES else since + 1
            found = excess(guess)
            if guess - low > 1 and found < NEVER:
                self._rate = max((found - at_low) / (sizes[guess] - sizes[low]), 1e-3)
            low, at_low, up = (guess, found, up) if found <= 0 else (low, at_low, guess)
        return low
