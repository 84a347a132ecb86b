"""The search shared by `auto` and related planners: mixes of actions on activations around a fixed placement.

Every candidate is simulated as a whole step, once. A dynamic program over the chain of blocks proposes mixes for the memory
that is left; uniform ones, the same for every block, are tried too; and early blocks may be offloaded (`hidden_offload.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.cost.launching import launching, starts
from holdall.errors import Unsupported
from holdall.planners.auto.bounds import Bounds, Extra
from holdall.planners.auto.hidden_offload import hidden_offloads, price_of, with_hidden
from holdall.planners.auto.spill import spill
from holdall.planning.chain_dp import best_choices
from holdall.planning.finish import outcome_of, over_budget, usable_bytes, with_traced
from holdall.planning.laid_out import with_layout
from holdall.planning.menus import Item, MenuLine, Menus, kind_of, order_of, try_offered
from holdall.planning.segments import segmented
from holdall.simulator import Lowering, simulate
from holdall.types import Action, Block, Choice, Hardware, Outcome, Problem
from holdall.types.trace import Bytes

_TRIES = 6  # times the dynamic program may run again with a budget corrected by the whole simulation
_FINE = 0.005  # of the bytes: how closely the least memory is looked for
_REASONS = 4  # reasons for dropped candidates that are reported
_NEAR = 0.5  # of the device's seconds, from where launches are counted, too
CLOSE = 1.02  # of the best time, for candidates that are looked at too
PLACEMENTS = 3  # placements that are tried with hidden offloading


@dataclass(frozen=True, slots=True)
class Candidate:
    label: str
    actions: tuple[Action, ...]
    outcome: Outcome


class Search:
    """All candidates of one problem; nothing is simulated twice."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.found: list[Candidate] = []
        self.dropped: dict[str, str] = {}  # candidates that cannot be carried out, and why
        self._refused: dict[tuple[Action, ...], str] = {}
        self._known: dict[tuple[Action, ...], Outcome | None] = {}
        self._allocated: dict[tuple[Action, ...], Outcome] = {}
        self._made: dict[tuple[str, Choice], Sequence[Action]] = {}  # by block and choice
        self._lines: dict[Choice, list[tuple[Block, MenuLine]]] = {}
        self._menus: Menus | None = None
        self._lowering = Lowering(problem)
        self.bounds = Bounds(problem)

    @property
    def menus(self) -> Menus:
        if self._menus is None:
            self._menus = try_offered(self.problem)
        return self._menus

    def attempt(self, label: str, actions: Sequence[Action]) -> Candidate | None:
        """Simulate a candidate and record it. None: it cannot be carried out, for the reason in `dropped`."""
        settled = self.spilled(tuple(actions))
        outcome = self.outcome(settled)
        if outcome is None:
            self.dropped.setdefault(label, self._refused[settled])
            return None
        made = Candidate(label, settled, outcome)
        if made not in self.found:
            self.found.append(made)
        return made

    def require(self, label: str, actions: Sequence[Action]) -> Candidate:
        """The same for an indispensable candidate: raises if it cannot be carried out."""
        made = self.attempt(label, actions)
        if made is None:
            raise Unsupported(
                f"{label}: {self.dropped[label]}", hint="choose another of `holdall planners`, such as --planner chen"
            )
        return made

    def outcome(self, actions: tuple[Action, ...]) -> Outcome | None:
        """The simulated step; None: these actions cannot be combined."""
        if actions not in self._known:
            try:
                self._known[actions] = simulate(self.problem, actions, lowering=self._lowering)
            except Unsupported as error:
                self._known[actions] = None
                self._refused[actions] = error.fact
        return self._known[actions]

    def spilled(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """The same actions, with tensors that exceed a tier moved to the next; with two tiers there is no next."""
        return spill(self.problem, actions, self.outcome)

    def why_dropped(self) -> list[str]:
        """One line per reason for which candidates were dropped."""
        reasons: dict[str, str] = {}
        for label, reason in self.dropped.items():
            reasons.setdefault(reason, label)
        return [f"{label} cannot be carried out: {reason}" for reason, label in reasons.items()][:_REASONS]

    def allocated(self, candidate: Candidate) -> Outcome:
        """The outcome with the device's allocator simulated."""
        if candidate.actions not in self._allocated:
            made = with_traced(self.problem, candidate.actions)
            outcome = outcome_of(self.problem, candidate.actions)
            self._allocated[candidate.actions] = with_layout(self.problem, made, outcome)[0]
        return self._allocated[candidate.actions]

    def fitting(self, problem: Problem) -> list[Candidate]:
        """Candidates within the budget of `problem`, the fastest first."""
        fitting = [c for c in self.found if not over_budget(problem, c.outcome)]
        return sorted(fitting, key=lambda c: (c.outcome.seconds, len(c.actions)))

    def fastest(self, problem: Problem) -> Candidate | None:
        return next(iter(self.fitting(problem)), None)

    @cached_property
    def for_all(self) -> tuple[Choice, ...]:
        """Choices that may apply to all blocks alike, in the order of the menus."""
        lines = [line for found in self.menus.found.values() for line in found]
        found = dict.fromkeys(line.choice for line in lines if line.choice.for_all)
        return tuple(sorted(found, key=order_of))

    def uniform(self, choice: Choice) -> tuple[Action, ...]:
        """The same choice for every block that has it."""
        return tuple(a for block, _ in self._having(choice) for a in self._actions(block, choice))

    def uniform_extra(self, choice: Choice) -> Extra:
        """The extra work of a uniform choice."""
        return Extra.of(line for _, line in self._having(choice))

    def _having(self, choice: Choice) -> list[tuple[Block, MenuLine]]:
        """The blocks that have a choice, with their menu line."""
        if choice not in self._lines:
            every = [(b, line) for b in self.menus.chain for line in self.menus.found.get(kind_of(b), ())]
            self._lines[choice] = [(b, line) for b, line in every if line.choice == choice]
        return self._lines[choice]

    def _actions(self, block: Block, choice: Choice) -> Sequence[Action]:
        key = block.name, choice
        if key not in self._made:
            self._made[key] = choice.on(self.problem.trace, block)
        return self._made[key]

    def best_placements(self, problem: Problem) -> list[tuple[Place, ...]]:
        """The placements of the fastest fitting candidates: hidden offloading may change their order."""
        return list(self._by_placement(problem))[:PLACEMENTS]

    def _by_placement(self, problem: Problem) -> dict[tuple[Place, ...], float]:
        """The least seconds of fitting candidates, by placement; the fastest first."""
        found: dict[tuple[Place, ...], float] = {}
        for candidate in self.fitting(problem):
            found.setdefault(tuple(a for a in candidate.actions if isinstance(a, Place)), candidate.outcome.seconds)
        return found

    def _is_in_vain(self, problem: Problem, around: Sequence[Action], extra: Extra) -> bool:
        """Is such a step certainly neither close to the fastest candidate nor able to make its placement one of the best? Then
        it need not be simulated."""
        found = self._by_placement(problem)
        if not found:
            return False
        seconds = list(found.values())
        places = tuple(a for a in around if isinstance(a, Place))
        mine = next((t for p, t in found.items() if _alike(p, places)), math.inf)
        third = seconds[PLACEMENTS - 1] if len(seconds) >= PLACEMENTS else math.inf
        return self.bounds.step(places[0] if places else None, extra) > max(CLOSE * seconds[0], min(mine, third))

    def mixes(self, problem: Problem, around: tuple[Action, ...], label: str) -> None:
        """The dynamic program's mixes of activations around a placement, and uniform ones."""
        tiers = ["", *(tier.name for tier in self.problem.hardware.others[1:])]
        for count in range(len(tiers) + 1):  # all tiers, then without the nearest, and so on
            try:
                items = self.menus.items(self.problem, around, without=tiers[:count])
            except Unsupported as error:
                self.dropped.setdefault(label, error.fact)
                break
            self._by_program(problem, items, around, label)
            if not any(c.choice.moves for i in items for c in i.choices):
                break
        for choice in self.for_all:
            actions = self.uniform(choice)
            if actions and not self._is_in_vain(problem, around, self.uniform_extra(choice)):
                self.attempt(f"{choice.label} all, {label}", (*actions, *around))

    def hide(self, problem: Problem, around: tuple[Action, ...]) -> None:
        """Mixes with early blocks offloaded during the whole forward: as many as the link can copy, and fewer."""
        items = self.menus.items(self.problem, around)
        price = price_of(best_choices(items, problem.limit(problem.home), problem.hardware))
        for leaving in hidden_offloads(problem, self.menus, items, price):
            for count in sorted({len(leaving), 2 * len(leaving) // 3} - {0}, reverse=True):
                some = leaving[:count]
                rest = with_hidden(items, some)
                actions = tuple(a for one in some for a in one.actions)
                self._by_program(problem, rest, (*actions, *around), f"{count} blocks offloaded meanwhile")

    def _by_program(self, problem: Problem, items: Sequence[Item], around: tuple[Action, ...], label: str) -> None:
        """The dynamic program's answer, simulated; solved again with a smaller budget where the whole step exceeds it."""
        for by_launches in self._prices:
            self._by_price(problem, items, around, label, by_launches=by_launches)

    @cached_property
    def _prices(self) -> tuple[bool, ...]:
        """Whether choices are also priced by their launches: where plain training spends as long on those as on the device, or
        nearly."""
        trace, each = self.problem.trace, launching(self.problem.hardware)
        is_near = each * sum(starts(trace)) > _NEAR * sum(op.seconds for op in trace.ops) if each else False
        return (False, True) if is_near else (False,)

    def _by_price(
        self, problem: Problem, items: Sequence[Item], around: tuple[Action, ...], label: str, *, by_launches: bool
    ) -> None:
        budget = problem.limit(problem.home)
        allowed = budget
        for n in range(_TRIES):
            self.problem.progress("searching", n, _TRIES, label)
            answer = best_choices(items, allowed, problem.hardware, by_launches=by_launches)
            if answer is None:
                break
            if self._is_in_vain(problem, around, Extra.of(answer[1])):
                break  # less memory takes longer
            chosen = [(i.block, c.choice) for i, c in zip(items, answer[1], strict=True)]
            actions = [a for block, choice in chosen for a in self._actions(block, choice)]
            candidate = self.attempt(f"the dynamic program's mix, {label}", (*actions, *around))
            if candidate is None:
                break
            excess = candidate.outcome.peak[problem.home] - budget
            if excess <= 0:
                break
            allowed -= excess

    def smallest_mixes(self, arounds: Iterable[tuple[Action, ...]]) -> None:
        """Last resorts as well: the mixes of the dynamic program in the least memory for which it has one."""
        for around in arounds:
            try:
                items = self.menus.items(self.problem, around)
            except Unsupported:
                continue
            enough = max(c.outcome.peak[self.problem.home] for c in self.found)
            least = _least_for(items, enough, self.problem.hardware)
            if least is not None:
                hardly = replace(self.problem, budget={**self.problem.budget, self.problem.home: least})
                self._by_price(hardly, items, around, "in the least memory", by_launches=False)

    def segments(self, arounds: Iterable[tuple[Action, ...]]) -> None:
        """Last resorts, for the smallest peak rather than the least time: rows of blocks recomputed together."""
        if not self.problem.permits(Recompute):
            return
        every = list(arounds)
        for n, actions in segmented(self.problem):
            for around in every:
                # streamed weights are excluded: a segment needs those of all its blocks at once
                self.attempt(f"segments of {n} blocks", (*actions, *around))


def _least_for(items: Sequence[Item], enough: Bytes, hardware: Hardware) -> Bytes | None:
    """The least memory for which the dynamic program has a mix; None: it has none for `enough`."""
    if best_choices(items, enough, hardware) is None:
        return None
    low, high = 0, enough
    while high - low > max(1, _FINE * high):
        middle = (low + high) // 2
        low, high = (low, middle) if best_choices(items, middle, hardware) is not None else (middle, high)
    return high


def _alike(some: Sequence[Place], others: Sequence[Place]) -> bool:
    """Do placements differ at most in speculative updates?"""
    return [replace(p, ahead=False) for p in some] == [replace(p, ahead=False) for p in others]


def usable(problem: Problem) -> Problem:
    """The same problem without the memory that the device's allocator cannot use; other tiers are unchanged."""
    limit = problem.limit(problem.home)
    if usable_bytes(problem, limit) == limit:
        return problem
    return replace(problem, budget={**problem.budget, problem.home: usable_bytes(problem, limit)})
