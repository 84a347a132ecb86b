"""Auto: the best mix of all actions under the budget: activations kept, recomputed or offloaded per block, weights resident or
streamed, updates on the device, on the host, or via the device.

For each placement of the model states (`placements.py`, ProTrain's question of how much is persistent) a dynamic program over
the chain of blocks (after pofo) chooses the actions for activations in the memory that is left. Placements are compared from
the one with most units on the device that fits, downwards. Every candidate is simulated as a whole step, and a plan that is
slower than a fitting fallback is not returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

from holdall.actions.in_backward import InBackward
from holdall.actions.place import Place
from holdall.errors import Infeasible, Unsupported
from holdall.planners.auto.across_blocks import plans_across_blocks
from holdall.planners.auto.placements import Guesses, Placements, PlacementShape
from holdall.planners.auto.search import CLOSE, Candidate, Search, usable
from holdall.planners.auto.sharded_states import ShardedStates
from holdall.planning.finish import NEVER, finish, over_budget
from holdall.planning.last_resorts import or_last_resort
from holdall.planning.updates_in_backward import plan_with_updates
from holdall.simulator import simulate
from holdall.types import KEEP, Action, Choice, Outcome, Phase, Plan, Problem
from holdall.units import format_bytes, format_seconds

_SHOWS = 0.88  # of the time without updates via the device; with them, clipped steps took up to 14 % longer than predicted
_ROOM = (0.97, 0.94)  # of the memory, where a plan that uses all of it makes the allocator move pages
_BUSY = 0.005  # share of a step spent in the allocator above which plans with less memory are tried
_SHARES = (1.0, 0.8, 0.6, 0.4, 0.0)  # of the units that could stay on the device: the rest of the memory is for activations
_TRIED_TWICE = 5  # candidates that are also simulated without clipping


@dataclass(frozen=True, slots=True)
class _Counts:
    """Bounds on the number of units updated on the device."""

    fewest: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Auto:
    via_device: bool | None = None  # allow updates via the device; None: if a gain is predicted
    ahead: bool = True  # allow speculative host updates

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "ours; after pofo (NeurIPS 2021), ProTrain (arXiv 2406.08334) and Chen et al. (arXiv 1604.06174)"
    weighs_budget: ClassVar[bool] = True

    @staticmethod
    def from_older(options: Mapping[str, Any]) -> dict[str, Any]:
        """Options by today's names: `via_device` was `through`."""
        return {"via_device" if name == "through" else name: value for name, value in options.items()}

    def __call__(self, problem: Problem) -> Plan:
        try:
            return or_last_resort(self, problem, self._best)
        except Infeasible:
            made = self._across_blocks(problem)
            if made is None:
                raise
            return made

    def _across_blocks(self, problem: Problem) -> Plan | None:
        """The fastest plan of a member that plans across blocks, where nothing else fits."""
        began = time.perf_counter()
        found = list(plans_across_blocks(usable(problem)))
        if not found:
            return None
        best = min(found, key=lambda plan: plan.predicted.seconds)
        why = [f"no choice for each block fits; the plan of {best.planner} does", *best.why]
        return finish(self, problem, best.actions, why=why, began=began)

    def _best(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        search = PlacementSearch(problem, via_device=self.via_device, ahead=self.ahead)
        plain = search.require("keep everything", ())
        less = usable(problem)
        if not over_budget(less, plain.outcome):
            return finish(self, problem, [], why=["plain training fits the budget: no action is needed"], began=began)
        other = self._with_updates_in_backward(problem)
        search.run(less)
        if search.fastest(less) is not None:
            best = search.leave_room(less, search.fastest_either_way(less))
            why = [*_why(problem, plain, best, search.found), *_why_cramped(search.allocated(best)), *search.why_dropped()]
            made = finish(self, problem, best.actions, why=why, began=began)
            return made if other is None or made.predicted.seconds <= other.predicted.seconds else other
        if other is not None:
            return other
        search.segments(search.tightest())
        search.smallest_mixes(search.tightest())
        least = min(search.found, key=lambda c: _lacking(problem, c))
        why = [*_why(problem, plain, least, search.found), *search.why_dropped()]
        return finish(self, problem, least.actions, why=why, began=began)

    def _with_updates_in_backward(self, problem: Problem) -> Plan | None:
        """The best mix of activations with updates in backward: only if allowed, since the loop never sees the gradients."""
        is_asked = problem.permits(InBackward) and not problem.reads_gradients and problem.accumulate == 1
        copies = problem.trace.about.precision is not None  # `place` updates working copies in backward
        if not is_asked or copies or not any(op.site.phase is Phase.STEP for op in problem.trace.ops):
            return None
        try:
            made = plan_with_updates(self, replace(problem, allow=problem.allow - {InBackward.name, Place.name}))
        except (Infeasible, Unsupported):
            return None
        return None if over_budget(problem, made.predicted) else made


class PlacementSearch(Search):
    """Placements of model states, and the actions on activations for each."""

    def __init__(self, problem: Problem, *, via_device: bool | None, ahead: bool) -> None:
        super().__init__(problem)
        self.via_device = via_device
        self.placements = Placements(problem)
        self.sharded = ShardedStates(problem)
        is_narrow = problem.trace.about.precision is not None
        self._may_be_ahead = ahead and is_narrow and self.placements.when == "overlap_forward"
        self._sizes = {u.name: u.numel for u in problem.trace.units}
        self._guesses = Guesses()
        self._not_clipped: dict[tuple[Action, ...], float] = {}
        self._ahead_at_most, self._ahead_below = 0, math.inf  # parameters updated on the host

    def attempt(self, label: str, actions: Sequence[Action]) -> Candidate | None:
        return super().attempt(label, self._ahead(tuple(actions)))

    def _ahead(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """The same actions with speculative updates, where the host has memory for them."""
        place = next((a for a in actions if isinstance(a, Place)), None)
        if not self._may_be_ahead or place is None or not self._has_room_ahead(place):
            return actions
        tried = tuple(replace(a, ahead=True) if a is place else a for a in actions)
        return actions if self._passes_host(tried) else tried

    def _has_room_ahead(self, place: Place) -> bool:
        """Has the host memory for speculative updates, with no activation offloaded?"""
        count = sum(self._sizes[unit] for unit, _, update in place.units if update == "host")
        if self._ahead_at_most < count < self._ahead_below:
            if self._passes_host((*self.uniform(self._lean(moving=False)[0]), replace(place, ahead=True))):
                self._ahead_below = count
            else:
                self._ahead_at_most = count
        return count <= self._ahead_at_most

    def _passes_host(self, actions: tuple[Action, ...]) -> bool:
        outcome = self.outcome(actions)
        return outcome is None or bool(over_budget(self.problem, outcome).keys() - {self.problem.home})

    def run(self, problem: Problem) -> None:
        """Add the best candidates for this budget, and the simple ones that a user would try by hand."""
        self.mixes(problem, (), "activations alone")
        if self.placements.is_possible:
            for spread in self._spreads(problem):
                place = self.placements.at(spread)
                self.mixes(problem, (place,), _describe(spread, len(self.placements.movable)))
            if self.fastest(problem) is None and self.placements.streamable:
                spread = self._least_of_all()
                self.mixes(problem, (self.placements.at(spread),), _describe(spread, len(self.placements.movable)))
        for count in self.sharded.counts(self, problem, self._least):
            self.mixes(problem, self.sharded.at(count), self.sharded.describe(count))
        for around in self.best_placements(problem):
            self.hide(problem, around)
        self._across_blocks(problem)

    def _across_blocks(self, problem: Problem) -> None:
        """Plans of members that plan across blocks, if faster by more than `CLOSE`. Where no choice for each block fits, last
        resorts come first."""
        best, plain = self.fastest(problem), self.outcome(())
        if best is None or (plain is not None and best.outcome.seconds <= CLOSE * plain.seconds):
            return
        for made in plans_across_blocks(problem):
            if CLOSE * made.predicted.seconds < best.outcome.seconds:
                self.attempt(f"the plan of {made.planner}", made.actions)

    def _spreads(self, problem: Problem) -> list[PlacementShape]:
        """Placements worth a search. With the number of streamed weights that makes steps fastest when activations take the
        least memory: the most units on the device, then fewer and fewer; and the placement with the fewest streamed weights
        that fits."""
        can = len(self.placements.streamable)
        levels = []
        for streamed in sorted({0, can // 2, can}):
            counts = self._on_device(problem, streamed)
            if counts is not None:
                seconds = self._least_seconds(problem, PlacementShape(counts.most, streamed, via_device=False))
                levels.append((seconds, streamed, counts.most, counts.fewest))
        if not levels:
            full = self._most_on_device(problem, can)  # where host memory is short, this needs the least of it
            return [PlacementShape(n, can, via_device=False) for n in dict.fromkeys((full or 0, 0))]
        seconds, streamed, most, fewest = min(levels)
        found = _fewer(most, streamed, fewest=fewest)
        how = self._how_to_pass(problem, found)
        if how is not None:
            found = [*(replace(spread, via_device=True, overlap_forward=how.overlap_forward) for spread in found), *found]
        close = [level for level in levels if level[1] != streamed and level[0] < CLOSE * seconds]
        found += [spread for _, other, count, least in close for spread in _fewer(count, other, _SHARES[:3], fewest=least)]
        resident = PlacementShape(levels[0][2], levels[0][1], via_device=False)
        if resident.streamed != streamed:
            found += [resident] if resident not in found else []
            how = self._how_to_pass_resident(problem, resident, seconds)
            if how is not None:
                counts_of = _fewer(resident.device, 0, fewest=levels[0][3])
                passing = (replace(spread, via_device=True, overlap_forward=how.overlap_forward) for spread in counts_of)
                found = [*passing, *found]
        return found

    def _how_to_pass_resident(self, problem: Problem, fewest: PlacementShape, seconds: float) -> PlacementShape | None:
        """The updates via the device of units that must keep their weights resident for it, if a step becomes shorter by more
        than the threshold. It does with optimizers that are slow on the host."""
        if fewest.streamed or self.via_device is False or not (self.via_device or problem.hardware.updates_beside):
            return None
        below = (1.0 if self.via_device else _SHOWS) * seconds
        found, how = self._fastest_passing(problem, [fewest], below=below)
        return how if found < below else None

    def _how_to_pass(self, problem: Problem, spreads: Sequence[PlacementShape]) -> PlacementShape | None:
        """The updates via the device, if allowed: as asked for, or if the predicted gain is above the threshold."""
        if self.via_device is False or not (self.via_device or problem.hardware.updates_beside):
            return None
        if self.via_device:
            return self._fastest_passing(problem, spreads)[1] or replace(spreads[0], via_device=True)
        without = math.inf
        for spread in spreads:
            without = min(without, self._least_seconds(problem, spread, below=without))
        return self._fastest_passing(problem, spreads, below=_SHOWS * without)[1]

    def _fastest_passing(
        self, problem: Problem, spreads: Sequence[PlacementShape], *, below: float = math.inf
    ) -> tuple[float, PlacementShape | None]:
        """(seconds, shape) with activations in the least memory, if below `below`."""
        seconds, how = below, None
        for passing in (passing for spread in spreads for passing in self.placements.passing(spread)):
            found = self._least_seconds(problem, passing, below=seconds)
            if found < seconds:
                seconds, how = found, passing
        return seconds, how

    def leave_room(self, problem: Problem, best: Candidate) -> Candidate:
        """The fastest of the best plan and the best ones in less memory, with the allocator's time counted: where free memory
        is fragmented, the allocator moves pages, so a step may take less time in less memory."""
        found = [best]
        for share in _ROOM:
            if not self._is_tight(found[-1]):
                break
            less = replace(problem, budget={**problem.budget, problem.home: int(share * problem.limit(problem.home))})
            self.run(less)
            if self.fastest(less) is None:
                break
            found.append(self.fastest_either_way(less))
            before = self.allocated(found[-2])
            if not before.cramped and found[-1].outcome.seconds >= before.seconds:  # even less memory takes even longer
                break
        if len(found) == 1:
            return found[0]
        return min(found, key=lambda c: (self.allocated(c).cramped, self._seconds_either_way(c, self.allocated(c))))

    def fastest_either_way(self, problem: Problem) -> Candidate:
        """Of the plans about as fast as the fastest for clipped steps, the fastest for clipped and other steps together."""
        found = self.fitting(problem)
        close = [c for c in found[:_TRIED_TWICE] if c.outcome.seconds <= CLOSE * found[0].outcome.seconds]
        return min(close, key=lambda c: self._seconds_either_way(c, c.outcome))

    def _seconds_either_way(self, candidate: Candidate, clipped: Outcome) -> float:
        """Seconds of a step if clipped and other steps are equally likely."""
        if not any(isinstance(a, Place) and a.ahead for a in candidate.actions):
            return clipped.seconds
        if candidate.actions not in self._not_clipped:
            self._not_clipped[candidate.actions] = simulate(replace(self.problem, clipped=False), candidate.actions).seconds
        return (clipped.seconds + self._not_clipped[candidate.actions] + clipped.churn) / 2

    def _is_tight(self, candidate: Candidate) -> bool:
        outcome = self.allocated(candidate)
        return outcome.cramped or outcome.churn > _BUSY * outcome.seconds

    def _on_device(self, problem: Problem, streamed: int) -> _Counts | None:
        """Bounds on the number of units updated on the device, with activations in the least memory: more exceed the device,
        fewer exceed the host. None: no number fits both."""
        for choices in (self._least, self._lean(moving=False)):  # offloaded tensors take host memory
            most = self._most_on_device(problem, streamed, choices)
            if most is not None and self._fits_least(problem, PlacementShape(most, streamed, via_device=False), choices):
                break
        else:
            return None
        low, high = 0, most
        if self._fits_least(problem, PlacementShape(0, streamed, via_device=False)):
            high = 0
        while low < high:
            middle = (low + high) // 2
            fits = self._fits_least(problem, PlacementShape(middle, streamed, via_device=False))
            low, high = (low, middle) if fits else (middle + 1, high)
        return _Counts(fewest=high, most=most)

    def _lean(self, *, moving: bool) -> tuple[Choice, ...]:
        """The choices with which activations take the least memory, with or without moving bytes."""
        return tuple(c for c in self.for_all if c.lean and c.moves == moving) or (KEEP,)

    @cached_property
    def _least(self) -> tuple[Choice, ...]:
        """All of these; first those that likely take less."""
        return *self._lean(moving=True), *self._lean(moving=False)

    def _most_on_device(self, problem: Problem, streamed: int, choices: Sequence[Choice] | None = None) -> int | None:
        """The number of units that the device can hold, host memory aside; None: not even zero fits."""
        most = len(self.placements.movable) - (0 if self.placements.castable else streamed)

        def excess(choice: Choice, count: int) -> int:
            outcome = self._least_of(self.placements.at(PlacementShape(count, streamed, via_device=False)), choice)
            return outcome.peak[problem.home] - problem.limit(problem.home) if outcome is not None else NEVER

        found: int | None = None
        for choice in choices or self._least:  # most units likely fit with the first
            more = self._guesses.most_that_fit(partial(excess, choice), self.placements.sizes[: most + 1], found or 0)
            found = more if more is not None else found
        return found

    def _fits_least(self, problem: Problem, spread: PlacementShape, choices: Sequence[Choice] | None = None) -> bool:
        """Does a placement fit with activations in the least memory that blocks can reach?"""
        place = self.placements.at(spread)
        outcomes = (self._least_of(place, choice) for choice in choices or self._least)
        return any(outcome is not None and not over_budget(problem, outcome) for outcome in outcomes)

    def _least_seconds(self, problem: Problem, spread: PlacementShape, *, below: float = math.inf) -> float:
        """With activations in the least memory; infinite where it does not fit or takes `below` or more."""
        place, least = self.placements.at(spread), math.inf
        for choice in self._least:
            if self.bounds.step(place, self.uniform_extra(choice)) >= min(least, below):
                continue
            outcome = self._least_of(place, choice)
            if outcome is not None and not over_budget(problem, outcome):
                least = min(least, outcome.seconds)
        return least if least < below else math.inf

    def _least_of(self, place: Place, choice: Choice) -> Outcome | None:
        return self.outcome(self.spilled(self._ahead((*self.uniform(choice), place))))

    def _least_of_all(self) -> PlacementShape:
        """Everything streamed, without overlap: slow, the last resort."""
        return PlacementShape(0, len(self.placements.streamable), via_device=False, overlap=False)

    def tightest(self) -> list[tuple[Action, ...]]:
        """Placements that take the least device memory."""
        if not self.placements.is_possible:
            return [self.sharded.at(self.sharded.most)]
        spreads = [self._least_of_all(), PlacementShape(0, 0, via_device=False)]
        return [(self.placements.at(spread),) for spread in spreads]


def _fewer(most: int, streamed: int, shares: Sequence[float] = _SHARES, *, fewest: int) -> list[PlacementShape]:
    """`most` units on the device, and fewer."""
    counts = dict.fromkeys(max(fewest, round(most * share)) for share in shares)
    return [PlacementShape(n, streamed, via_device=False) for n in counts]


def _lacking(problem: Problem, candidate: Candidate) -> tuple[int, int]:
    """Bytes that a plan exceeds its budget by, and its peak on the device."""
    return sum(over_budget(problem, candidate.outcome).values()), candidate.outcome.peak[problem.home]


def _describe(spread: PlacementShape, count: int) -> str:
    text = f"{spread.device} of {count} units updated on the device"
    text += f", {spread.streamed} streamed" if spread.streamed else ""
    text += ", updates overlap the next forward" if spread.overlap_forward else ""
    text += "" if spread.overlap else ", copies do not overlap"
    return text if spread.via_device else f"{text}, none updated via the device"


def _why(problem: Problem, plain: Candidate, best: Candidate, found: list[Candidate]) -> list[str]:
    budget = problem.limit(problem.home)
    extra = best.outcome.seconds - plain.outcome.seconds
    reasons = [
        f"keeping everything needs {format_bytes(plain.outcome.peak[problem.home])}, over the budget of {format_bytes(budget)}",
        f"{best.label} needs {format_bytes(best.outcome.peak[problem.home])} and adds {format_seconds(max(extra, 0.0))} a step",
    ]
    others = [c for c in found if c is not best and c is not plain]
    for other in sorted(others, key=lambda c: c.outcome.seconds)[:8]:
        fits = not over_budget(problem, other.outcome)
        slower = other.outcome.seconds - best.outcome.seconds
        verdict = f"would take {format_seconds(slower)} more" if slower >= 0 else "leaves the allocator too little room"
        verdict = verdict if fits else "does not fit"
        reasons.append(f"{other.label} ({format_bytes(other.outcome.peak[problem.home])}) {verdict}")
    return list(dict.fromkeys(reasons))


def _why_cramped(outcome: Outcome) -> list[str]:
    if outcome.cramped:
        return ["memory may be too fragmented for one allocation although enough bytes are free: a step may be retried"]
    if outcome.churn > 0:
        return [f"{format_seconds(outcome.churn)} of a step go to the allocator moving pages; less memory would be slower"]
    return []
