"""Pofo: cut the chain of blocks into segments; keep or offload each one's saved tensors, all of them or only its input.

Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs" (NeurIPS 2021).
Forward and backward of a stage nest around those of all later stages, so one walk in forward order sees both: backward is a
second forward in reversed time, in which fetched bytes "leave". The program's state before a stage is therefore

    K    bytes that earlier stages pin in memory, from their forward to their backward
    D_F  bytes offloaded by earlier stages that have not left yet
    D_B  bytes of earlier stages that must be back before this stage's backward ends

and a stage that needs more than is free waits until enough of the backlog has left. A state is dropped if another one, having
waited until its backlog is no larger, would be no later and pin no more.

`solve` works on numbers alone. `costs_of_chain` gives it the paper's chain, where the inside of a recomputed segment is any
nesting of recomputations (rotor's table). `costs_of_trace` gives it what our runtime executes: the replay of a segment is
nested in the same ways (`replays.py`). Copies are planned in two ways, of which the faster is taken: an offloaded block is
copied out when the next block's forward is over, and is fetched during the backward of the next segment or, where memory is
short, when it is needed; or, as in the paper, copies take as many blocks as they need, one after the other. The second is
tried where most blocks are alike, as in transformers: the backlogs of unlike blocks make too many states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import ClassVar, NamedTuple

from holdall.actions.offload import Offload, held, own_inputs, replayed
from holdall.actions.recompute import WHOLE, Recompute
from holdall.errors import InvalidInput
from holdall.planners.pofo.program import ROUGH, Costs, Node, PofoLink, PofoSegment, Way, solve
from holdall.planners.pofo.replays import Replays
from holdall.planners.rotor.table import Stage, Table
from holdall.planning.finish import NEVER, finish, outcome_or_never, over_budget
from holdall.planning.menus import Item, MenuLine, make_menus
from holdall.planning.segments import runs
from holdall.simulator import simulate
from holdall.types import Action, Block, Choice, Outcome, Plan, Problem, Trace
from holdall.units import format_bytes, format_seconds

_TRIES = 6  # times the program may run again with a budget corrected by the whole simulation
_FETCHED = (replayed(late=True), replayed(late=False))  # if nothing moves: plain recompute
_OFFLOADED = (held(late=True), held(late=False))
_TOLL = 1e-3  # share of a hidden copy's time that is charged, so that no copy is free
_HALVINGS = 12  # halvings of the interval in the search for the smallest budget


# the paper's chain


def costs_of_chain(chain: Sequence[Stage], budget: int, *, slots: int = 500) -> Costs:
    """The paper's schedules: the inside of a segment is rotor's table, in slots where the budget is larger."""
    unit = max(1, -(-budget // slots))
    table = Table([_in_slots(stage, unit) for stage in chain], budget // unit)
    after = [*(stage.a for stage in chain[1:]), 0]
    nodes = []
    for stage, out in zip(chain, after, strict=True):
        forward, backward = stage.abar + 2 * out + stage.of, stage.a + stage.abar + out + stage.ob
        nodes.append(
            Node(
                uf=stage.uf,
                ub=stage.ub,
                full=(
                    Way("keep", stage.abar, 0, forward, backward),
                    Way("offload", 0, stage.abar, forward, backward),
                ),
                input=(Way("keep", stage.a), Way("offload", 0, stage.a)),
                bare=stage.a + out + stage.of,
                joins=True,
            )
        )
    stairs = {
        (s, t): [(chain[s].a + m * unit, seconds) for m, seconds in table.stairs(s, t)]
        for s in range(len(chain))
        for t in range(s, len(chain))
    }
    return Costs(nodes=nodes, inside=lambda s, t: stairs[s, t])


def _in_slots(stage: Stage, unit: int) -> Stage:
    up = {name: -(-getattr(stage, name) // unit) for name in ("a", "abar", "of", "ob")}
    return replace(stage, **up)


# our blocks


def costs_of_trace(problem: Problem, menus: Sequence[Item]) -> Costs:
    """Costs of the blocks of a trace. K is the bytes freed, negative; needs come from the untouched step and the menus."""
    trace, overlap = problem.trace, problem.hardware.overlap
    far = problem.hardware.far
    toll = _TOLL * (1 / far.write + 1 / far.read) if far else 0.0
    row = {block.id: n for n, blocks in enumerate(runs(trace)) for block in blocks}
    nodes, again, between = [], [], []
    for n, item in enumerate(menus):
        lines = {line.choice: line for line in item.choices}
        before = menus[n - 1].block if n else None
        tail = before is item.block  # from the last block's forward to the first backward
        recomputed = _recomputed(problem, item, lines) if item.block.id in row and not tail else None
        joins = recomputed is not None and before is not None and row.get(before.id) == row[item.block.id]
        between.append(_bytes_between(trace, before, item.block) if joins and before is not None else 0)
        again.append(recomputed)
        hidden = overlap and item.block.id + 1 < len(trace.blocks)  # the next block hides the copies
        full = [_way("keep", item, item.choices[0]), *_moving(trace, item, lines, _OFFLOADED, hidden, toll)]
        inputs = [] if recomputed is None else [_way("keep", item, recomputed)]
        inputs += _moving(trace, item, lines, _FETCHED, hidden, toll) if inputs else []
        nodes.append(
            Node(
                uf=item.forward_seconds,
                ub=item.backward_seconds,
                full=tuple(full),
                input=tuple(inputs),
                bare=inputs[0].forward if inputs else 0,
                inner=inputs[0].pinned - between[-1] if inputs else 0,
                joins=joins,
            )
        )
    return Costs(nodes=nodes, inside=Replays(problem, menus, nodes, again, between))


def _moving(
    trace: Trace, item: Item, lines: Mapping[Choice, MenuLine], choices: Sequence[Choice], hidden: bool, toll: float
) -> list[Way]:
    """The ways to offload, hidden and at once; a choice that moves no bytes is left out.

    Menus try one block of each kind. The first of a stack may move less than the others: its input belongs to the user.
    """
    most = _movable(trace, item.block, replayed=choices is _FETCHED)
    ways = []
    for line in (lines[choice] for choice in choices if choice in lines):
        moved = min(line.out, most)
        if moved:
            way = _way("offload", item, line)
            ways.append(
                way._replace(
                    pinned=way.pinned + line.out - moved,
                    moved=moved,
                    at_once=not (hidden and line.late),
                    toll=moved * toll,
                )
            )
    return ways


def _movable(trace: Trace, block: Block, *, replayed: bool) -> int:
    """Bytes freed by offloading this block, or its input if it is `replayed`."""
    own = {block.inputs[n] for n in own_inputs(trace, block)}
    if not replayed:
        saved = {trace.saves[n].tensor for n in block.saves}
        inside = {x for x in saved if block.first <= trace.tensors[x].born <= block.last and x not in block.outputs}
        own = inside | (own & saved)
    return sum(trace.tensors[x].nbytes for x in own)


def _recomputed(problem: Problem, item: Item, lines: Mapping[Choice, MenuLine]) -> MenuLine | None:
    """The recomputed block; it may be part of a segment even where recomputing it alone frees nothing."""
    if not problem.permits(Recompute):
        return None
    found = [lines[choice] for choice in (WHOLE, *_FETCHED) if choice in lines and not lines[choice].out]
    return found[0] if found else replace(item.choices[0], choice=WHOLE, seconds=item.forward_seconds)


def _bytes_between(trace: Trace, before: Block, block: Block) -> int:
    """Bytes passed from one block to the next and held by these two only: freed if both are in one segment."""
    numbers = {*before.saves, *block.saves}
    held = {save.tensor for n, save in enumerate(trace.saves) if n not in numbers}
    others = {x for other in trace.blocks if other.id != block.id for x in other.inputs}
    passed = [x for x in block.inputs if x in before.outputs and x not in held and x not in others]
    return sum(trace.tensors[x].nbytes for x in passed if before.first <= trace.tensors[x].born <= before.last)


def _way(place: str, item: Item, line: MenuLine) -> Way:
    return Way(place, -line.freed, line.out, item.before_forward + line.forward, item.before_backward + line.backward)


def actions_of(
    problem: Problem, menus: Sequence[Item], segments: Sequence[PofoSegment], costs: Costs | None = None
) -> list[Action]:
    """The actions for these decisions. `costs`: holds the nesting of replays; without it they are not nested."""
    replays = costs.inside if costs is not None and isinstance(costs.inside, Replays) else None
    trace, overlap = problem.trace, problem.hardware.overlap
    actions: list[Action] = []
    for n, segment in enumerate(segments):
        blocks = [item.block for item in menus[segment.first : segment.last + 1]]
        if segment.saved == "input":
            inner = replays.inner(segment.first, segment.last, segment.need) if replays is not None else ()
            actions.append(Recompute.of(trace, blocks, inner=inner))
        if segment.place == "offload":
            following = menus[segments[n + 1].last].block if n + 1 < len(segments) else blocks[-1]
            ahead = overlap and not segment.back_at_once and following.id > blocks[-1].id
            offload = Offload.of(trace, blocks[0], overlap=overlap and not segment.out_at_once)
            actions.append(replace(offload, fetch=following.name if ahead else ""))
    return actions


def with_long_copies(problem: Problem, menus: Sequence[Item], actions: Sequence[Action]) -> list[Action]:
    """The same actions, with copies that take as many blocks as they need: one after the other, each freed at the end of the
    block by which it is done, and fetched from the backward of the last block that leaves time for it."""
    far, trace = problem.hardware.far, problem.trace
    assert far is not None
    forward = [item for item in menus if item.forward_seconds]
    ends = dict(zip((i.block.name for i in forward), accumulate(i.forward_seconds for i in forward), strict=True))
    back = [item for item in reversed(menus) if item.block.backward is not None]
    starts: dict[str, float] = {}
    for item, start in zip(back, accumulate((i.backward_seconds for i in back), initial=0.0), strict=False):
        starts.setdefault(item.block.name, start)
    moved = {a.block: _moved_bytes(trace, a, actions) for a in actions if isinstance(a, Offload)}
    until, free = {}, 0.0
    for name in sorted(moved, key=lambda name: trace.block(name).id):
        free = max(free, ends.get(name, 0.0)) + far.latency + moved[name] / far.write
        later = [b for b, end in ends.items() if trace.block(b).id > trace.block(name).id]
        until[name] = next((b for b in later if ends[b] >= free), later[-1] if later else "")
    fetch, free = {}, inf
    for name in sorted(moved, key=lambda name: trace.block(name).id):  # the first block is needed last
        free = min(free, starts.get(name, 0.0)) - far.latency - moved[name] / far.read
        later = [b for b in starts if trace.block(b).id > trace.block(name).id]
        early = [b for b in later if starts[b] <= free]
        fetch[name] = max(early, key=lambda b: starts[b], default=later[0] if later else "")
    return [
        replace(a, lag=bool(until[a.block]), until=until[a.block], fetch=fetch[a.block]) if isinstance(a, Offload) else a
        for a in actions
    ]


def are_alike(sizes: Sequence[int]) -> bool:
    """Do blocks hold so many different numbers of bytes as half of the blocks, or fewer?"""
    return 2 * len({*sizes}) <= len(sizes)


def _moved_bytes(trace: Trace, offload: Offload, actions: Sequence[Action]) -> int:
    block = trace.block(offload.block)
    again = {name for a in actions if isinstance(a, Recompute) for name in a.blocks}
    return _movable(trace, block, replayed=block.name in again)


# the planner


class _Candidate(NamedTuple):
    segments: list[PofoSegment]
    actions: list[Action]
    outcome: Outcome
    missing: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Pofo:
    slots: int = 500  # states per stage; more make the search finer and slower

    name: ClassVar[str] = "pofo"
    paper: ClassVar[str] = "Beaumont, Eyraud-Dubois, Shilova, NeurIPS 2021"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.slots < 1:
            raise InvalidInput(
                f"`slots` of pofo is {self.slots}; it must be at least 1", hint="give the states per stage, such as slots=500"
            )
        plain = _try(problem, (), [])
        if not plain.missing:
            return finish(self, problem, [], why=["plain training fits the budget: no action is needed"], began=began)
        menus = make_menus(problem)
        costs = costs_of_trace(problem, menus)
        found = self._search(problem, menus, costs, offload=True)
        if problem.hardware.overlap and are_alike([_movable(problem.trace, item.block, replayed=False) for item in menus]):
            found += self._search(problem, menus, costs, offload=True, long=True)
        if all(c.missing for c in found):
            found += self._search(problem, menus, costs, offload=False)
        if all(
            c.missing for c in found
        ):  # the rest does not depend on the budget, so that the smallest budget in the error is reliable
            found = [plain, *(c for offload in (True, False) for c in self._smallest(problem, menus, costs, offload=offload))]
        fitting = [c for c in found if not c.missing]
        best = min(fitting or found, key=lambda c: (c.outcome.seconds, len(c.actions)) if fitting else _size(problem, c))
        return finish(self, problem, best.actions, why=_why(problem, plain, best), began=began)

    def _search(
        self, problem: Problem, menus: Sequence[Item], costs: Costs, *, offload: bool, long: bool = False
    ) -> list[_Candidate]:
        """The program's answer, simulated; solved again with a smaller budget where the whole step exceeds it. `long`: copies
        may take several blocks."""
        allowed = problem.limit(problem.home)
        found: list[_Candidate] = []
        for n in range(_TRIES):
            problem.progress("searching", n, _TRIES, "")
            slots = min(self.slots, ROUGH) if long else self.slots  # backlogs multiply the states
            candidate = _ask(problem, menus, costs, allowed, offload=offload, slots=slots, long=long)
            if candidate is None:
                break
            found.append(candidate)
            if problem.home not in candidate.missing and not long:
                break
            missing = candidate.missing.get(problem.home, 0)
            if long:  # tensors are freed whole, later than the program counts: answers for less memory may be faster
                missing = max(missing, problem.limit(problem.home) // 20)
            allowed -= missing if missing < NEVER // 2 else allowed // 20 + 1  # leave out the answer that cannot be carried out
        return found

    def _smallest(self, problem: Problem, menus: Sequence[Item], costs: Costs, *, offload: bool) -> list[_Candidate]:
        """Answers for ever smaller budgets: the last resort, and the smallest budget that the error names."""
        low, high = 0, simulate(problem, []).peak[problem.home]
        found = []
        for n in range(_HALVINGS):
            problem.progress("looking for the smallest", n, _HALVINGS, "")
            middle = (low + high) // 2
            candidate = _ask(problem, menus, costs, middle, offload=offload, slots=min(self.slots, ROUGH))
            if candidate is None:
                low = middle
            else:
                found.append(candidate)
                high = middle
        return found


def _ask(
    problem: Problem,
    menus: Sequence[Item],
    costs: Costs,
    allowed: int,
    *,
    offload: bool,
    slots: int,
    long: bool = False,
) -> _Candidate | None:
    """The program's answer for `allowed` bytes, simulated as a whole step; None: there is none."""
    far = problem.hardware.far
    hidden = None if long else int(problem.hardware.overlap)
    link = PofoLink(out=far.write, back=far.read, hidden_by=hidden) if far else PofoLink(out=0.0, back=0.0)
    answer = solve(costs, allowed, link, offload=offload, slots=slots)
    if answer is None:
        return None
    actions = actions_of(problem, menus, answer[1], costs)
    return _try(problem, answer[1], with_long_copies(problem, menus, actions) if long else actions)


def _try(problem: Problem, segments: Sequence[PofoSegment], actions: Sequence[Action]) -> _Candidate:
    outcome = outcome_or_never(problem, actions)
    return _Candidate(list(segments), list(actions), outcome, over_budget(problem, outcome))


def _size(problem: Problem, candidate: _Candidate) -> tuple[float, int]:
    outcome = candidate.outcome
    return max(outcome.peak[problem.home], outcome.reserved or 0), len(candidate.actions)


def _why(problem: Problem, plain: _Candidate, best: _Candidate) -> list[str]:
    home, limit = problem.home, problem.limit(problem.home)
    counts: dict[tuple[str, str], int] = {}
    for segment in best.segments:
        counts[segment.saved, segment.place] = counts.get((segment.saved, segment.place), 0) + 1
    words = {
        ("all", "offload"): "offload a block",
        ("input", "keep"): "recompute a segment",
        ("input", "offload"): "recompute a segment from its offloaded input",
    }
    done = ", ".join(f"{counts[key]} x {word}" for key, word in words.items() if key in counts) or "nothing"
    extra = max(0.0, best.outcome.seconds - plain.outcome.seconds)
    return [
        f"keeping everything needs {format_bytes(plain.outcome.peak[home])}, over the budget of {format_bytes(limit)}",
        f"{done}: {format_bytes(best.outcome.peak[home])} and {format_seconds(extra)} more per step",
    ]
