"""Angel-PTM: states in pages, and one scheduler that moves each page as early as memory allows.

Nie et al., VLDB 2023 (arXiv 2303.02868). A page holds at most two tensors; large tensors span pages, and tails share one. From
the lifetimes that the first iteration records, the scheduler decides once:

1. As many weights as fit stay on the device, in the order of their first use, beside the unit in use and the next one. A move
   for each of the others comes right before its use, and its pages are released after it.
2. Each move, in order, is hoisted to the earliest moment from which on its pages fit beside everything else.
3. The memory that is left at every moment caches optimizer states, whose update is then made on the device; the host makes the
   others as gradients come, where the loop permits.

Here the trace is the first iteration. The runtime moves whole units: pages say how many bytes one takes. It begins every fetch
the same number of streamed units ahead, so the shortest hoist counts (`Place.prefetch`). Where a plan does not fit by the
simulator, the planner is told that the device has less memory.

Not here: several ranks (gathers are hoisted likewise), states on a disk with updates that the device does not wait for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from holdall.errors import InvalidInput
from holdall.planning.chunk_tracer import TracedStates, place_units, trace_states
from holdall.planning.state_planners import update_moment
from holdall.planning.within import Proposal, finish_within
from holdall.types import Action, Plan, Problem
from holdall.units import MiB

PAGE = 4 * MiB  # on a GPU
SMALL_PAGE = 512  # bytes, on a CPU


@dataclass(frozen=True, kw_only=True)
class AngelPTM:
    page: int = 0  # bytes; 0: 4 MiB on a GPU, 512 bytes on a CPU
    hoist: bool = True  # moves begin as early as memory allows; else right before each use, and the device waits
    recompute: bool | None = None  # every block, or none; None: every block where nothing fits without

    name: ClassVar[str] = "angel_ptm"
    paper: ClassVar[str] = "Nie et al., VLDB 2023, arXiv 2303.02868"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.page < 0:
            raise InvalidInput(f"`page` is {self.page} bytes", hint="use 1 or more, or 0 for the default")
        page = self.page or (PAGE if problem.hardware.device == "cuda" else SMALL_PAGE)
        recorded: dict[bool, Lifetimes] = {}

        def propose(blocks: Sequence[Action], limit: int) -> Proposal:
            if bool(blocks) not in recorded:
                recorded[bool(blocks)] = lifetimes(problem, trace_states(problem, blocks), page)
            return self._propose(problem, recorded[bool(blocks)], limit)

        return finish_within(self, problem, propose, recompute=self.recompute, began=began)

    def _propose(self, problem: Problem, lives: Lifetimes, limit: int) -> Proposal:
        hoist = self.hoist and problem.hardware.overlap
        kept = keep(lives, limit, slots=2 if hoist else 1)
        moves = schedule(lives, kept, limit, hoist=hoist)
        cached = cache_states(lives, kept, moves, limit)
        ahead = units_ahead(lives, moves)
        units = lives.traced.units
        place = place_units(
            problem,
            lives.traced,
            streamed={unit.name for n, unit in enumerate(units) if n not in kept},
            on_device={units[n].name for n in cached},
            when=update_moment(problem),
            overlap=hoist and (ahead > 0 or not moves),
            prefetch=max(1, ahead),
        )
        why = (
            f"of {len(lives.weights)} units {len(kept)} stay, {len(cached)} with their states, in pages of {lives.page} bytes",
            f"{len(moves)} moves in a step, each begun at least {ahead} streamed units ahead",
        )
        return Proposal(place, why)


# pages


@dataclass
class PageTable:
    """Tensors in pages of `size` bytes: no page holds more than two, and only its last page is not full for a tensor."""

    size: int
    pages: dict[int, dict[int, int]] = field(default_factory=dict)  # page -> tensor -> bytes
    _next: int = 0

    def allocate(self, tensor: int, nbytes: int) -> list[int]:
        """The pages of a tensor; its tail shares the fullest page that has room and only one tensor."""
        whole, tail = divmod(nbytes, self.size)
        found = [self._new({tensor: self.size}) for _ in range(whole)]
        if tail:
            can = [(sum(held.values()), -page) for page, held in self.pages.items() if len(held) == 1 and tensor not in held]
            shared = max(((taken, page) for taken, page in can if taken + tail <= self.size), default=None)
            if shared is None:
                found.append(self._new({tensor: tail}))
            else:
                self.pages[-shared[1]][tensor] = tail
                found.append(-shared[1])
        return found

    def release(self, tensor: int) -> None:
        for page in [p for p, held in self.pages.items() if tensor in held]:
            del self.pages[page][tensor]
            if not self.pages[page]:
                del self.pages[page]

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.size

    def _new(self, held: dict[int, int]) -> int:
        self._next += 1
        self.pages[self._next] = held
        return self._next


def paged(sizes: Iterable[int], page: int) -> int:
    """Bytes of the pages of tensors that move together."""
    table = PageTable(page)
    for n, size in enumerate(sizes):
        table.allocate(n, size)
    return table.nbytes


# the scheduler


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """Bytes of every unit, and the units and other bytes of every moment of a step."""

    traced: TracedStates
    page: int
    weights: tuple[int, ...]
    states: tuple[int, ...]  # with gradients, which stay for an update on the device; 0: not trained
    fixed: frozenset[int]  # units that always stay
    uses: tuple[int, ...]  # the unit of every moment
    others: tuple[int, ...]  # bytes of every moment that are no weights


class Move(NamedTuple):
    """A unit's pages come to the device."""

    unit: int
    use: int  # the moment that needs them, after which they are released
    begins: int  # the moment at whose beginning they set out


def lifetimes(problem: Problem, traced: TracedStates, page: int) -> Lifetimes:
    tensors = problem.trace.tensors
    return Lifetimes(
        traced=traced,
        page=page,
        weights=tuple(paged((tensors[x].nbytes for x in u.weights), page) for u in traced.units),
        states=tuple(paged((tensors[x].nbytes for x in (*u.states, *u.grads)), page) for u in traced.units),
        fixed=traced.fixed,
        uses=tuple(m.unit for m in traced.moments),
        others=tuple(m.others for m in traced.moments),
    )


def keep(lives: Lifetimes, limit: int, *, slots: int = 1) -> set[int]:
    """Units whose weights stay: the first ones, as many as fit beside `slots` of the others."""
    kept = set(lives.fixed)
    for unit in range(len(lives.weights)):
        more = kept | {unit}
        rest = sorted((n for n in range(len(lives.weights)) if n not in more), key=lambda n: -lives.weights[n])
        room = sum(lives.weights[n] for n in rest[1:slots])  # beside the one in use
        if max(occupied(lives, more, ())) + room > limit and unit not in kept:
            break
        kept = more
    return kept


def occupied(lives: Lifetimes, kept: set[int], moves: Sequence[Move]) -> list[int]:
    """Bytes of every moment: others, units that stay, the unit in use, and those that are on their way."""
    stays = sum(lives.weights[n] for n in kept)
    found = [
        others + stays + (0 if unit in kept else lives.weights[unit])
        for unit, others in zip(lives.uses, lives.others, strict=True)
    ]
    for move in moves:
        for now in range(move.begins, move.use):
            found[now] += lives.weights[move.unit]
    return found or [0]


def schedule(lives: Lifetimes, kept: set[int], limit: int, *, hoist: bool) -> list[Move]:
    """A move for every use of a unit that does not stay, each begun as early as memory allows, in order."""
    busy = occupied(lives, kept, ())
    moves: list[Move] = []
    released: dict[int, int] = {}  # unit -> the moment from which on it is gone again
    for use, unit in enumerate(lives.uses):
        if unit in kept:
            continue
        first = max(released.get(unit, 0), moves[-1].begins if moves else 0)
        begins = use
        while hoist and begins > first and busy[begins - 1] + lives.weights[unit] <= limit:
            begins -= 1
            busy[begins] += lives.weights[unit]
        moves.append(Move(unit, use, begins))
        released[unit] = use + 1
    return moves


def units_ahead(lives: Lifetimes, moves: Sequence[Move]) -> int:
    """How many streamed units are used while a move is on its way, for the move with the fewest.

    The first moves of forward and backward cannot begin earlier than their pass, in the runtime.
    """
    back = {m.use for m in moves if lives.traced.moments[m.use].is_backward}
    fewest = len(lives.weights)
    for part in ([m for m in moves if m.use not in back], [m for m in moves if m.use in back]):
        for n, move in enumerate(part):
            ahead = sum(move.begins <= before.use for before in part[:n])
            if ahead < n:  # else it begins with its pass
                fewest = min(fewest, ahead)
    return fewest if moves else 0


def cache_states(lives: Lifetimes, kept: set[int], moves: Sequence[Move], limit: int) -> list[int]:
    """Units that stay with their states: the first ones, as many as every moment has room for."""
    left = limit - max(occupied(lives, kept, moves))
    found = []
    for unit in sorted(kept):
        if lives.states[unit] > left:
            break
        left -= lives.states[unit]
        found.append(unit)
    return found
