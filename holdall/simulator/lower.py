"""Actions -> schedule -> the full list of steps, with every free derived."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from holdall.errors import InvalidInput
from holdall.simulator.accumulate import accumulated
from holdall.types import Action, Collect, Copy, Drop, Kind, Problem, Run, Schedule, Step, TensorInfo, Wait
from holdall.types.schedule import Mark
from holdall.types.trace import TensorId

_KEPT = 12  # cached schedules, some MB each

_Moments = dict[TensorId, list[int]]


def lower(problem: Problem, actions: Iterable[Action]) -> Schedule:
    """The trace's schedule rewritten by the actions, in the order of their ranks."""
    return Lowering(problem).lower(actions)


class Lowering:
    """Caches schedules of one problem for a search: the rewriting for activations is done once for all placements of states
    tried with it, since `place` comes last.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[Action, ...], Schedule] = {}
        self._changed: Lowering | None = None  # of the step with other ops

    def lower(self, actions: Iterable[Action]) -> Schedule:
        ordered = sorted(actions, key=lambda a: a.rank)
        under = self._problem.under(ordered)
        if under is not self._problem:
            if self._changed is None or self._changed._problem.trace is not under.trace:
                self._changed = Lowering(under)
            return self._changed.lower(ordered)
        _once_per_block(ordered)
        count = next((n for n, action in enumerate(ordered) if action.places_states), 0)
        if not count:
            return self._rewritten(self._begin(ordered), ordered)
        before = tuple(ordered[:count])
        if before not in self._known:
            if len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[before] = self._rewritten(self._begin(ordered), before)
        else:
            self._known[before] = self._known.pop(before)  # mark as most recently used
        return self._rewritten(self._known[before], ordered[count:])

    def _begin(self, actions: Iterable[Action]) -> Schedule:
        problem = self._problem
        schedule = Schedule(trace=problem.trace, home=problem.home)
        _leave_to_process(schedule, problem)
        if not any(action.places_states for action in actions):  # actions that place states insert the accumulation themselves
            schedule = accumulated(schedule, problem)
        return schedule

    def _rewritten(self, schedule: Schedule, actions: Iterable[Action]) -> Schedule:
        for action in actions:
            schedule = action.rewrite(schedule, self._problem)
        return schedule


def _leave_to_process(schedule: Schedule, problem: Problem) -> None:
    """Count the process's own memory (Python, torch, the user's data) on the host, if that is the farther tier."""
    trace, far = problem.trace, problem.hardware.far
    size = trace.about.process
    if size and far is not None and problem.hardware.device == "cuda":
        like = TensorInfo(
            id=0, name="the process itself", kind=Kind.BUFFER, shape=(size,), dtype="uint8", nbytes=size, born=-1, freed=None
        )
        schedule.start[schedule.add(like)] = far.name


def blocks_of(action: Action) -> tuple[str, ...]:
    """The blocks of an action; empty if it concerns model states or the whole step."""
    several = getattr(action, "blocks", None)
    one = getattr(action, "block", None)
    return tuple(several) if several else () if one is None else (one,)


def _once_per_block(actions: Iterable[Action]) -> None:
    """Refuse an action twice on one block, unless each treats a part of it, and another action on a block that one claims
    exclusively (`alone`)."""
    seen: dict[str, list[Action]] = {}
    for action in actions:
        for block in blocks_of(action):
            for other in [*seen.get(block, ()), *(seen.get("", ()) if block else [a for v in seen.values() for a in v])]:
                if action.name == other.name and action.shares(other):
                    continue
                if action.name == other.name:
                    raise InvalidInput(f"`{block}` has the action {action.name} twice", hint="name each block once per action")
                if excludes(action, other, block) or excludes(other, action, block):
                    raise InvalidInput(f"`{block}` cannot have both {other.name} and {action.name}", hint="choose one of them")
            seen.setdefault(block, []).append(action)


def excludes(action: Action, other: Action, block: str) -> bool:
    """Does an action that claims the block, or the whole model, exclude the other?"""
    is_same = block in blocks_of(action) and block in blocks_of(other)
    return action.alone and not (is_same and other.name in action.beside)


@dataclass(slots=True)
class _Uses:
    """The numbers of the steps at which tensors are made and used.

    Most tensors are made once: `made_at` and `last` are enough for them. For those that come to the device several times, and
    for farther tiers, every beginning and every use is recorded.
    """

    first: list[int]  # op -> its first run; at -1: before all ops, at the number of ops: never
    later: dict[Mark, int] = field(default_factory=dict)  # repeated runs
    made_at: dict[TensorId, int] = field(default_factory=dict)  # start of the only stay on the device
    last: dict[TensorId, int] = field(default_factory=dict)
    tiers: dict[str, tuple[_Moments, _Moments]] = field(  # tier -> beginnings, uses
        default_factory=lambda: defaultdict(lambda: (defaultdict(list), defaultdict(list)))
    )

    def of_mark(self, mark: Mark) -> int:
        """The step at which an op runs: for the first time, or as the mark says."""
        return self.later.get(mark, -1) if mark[1] else self.first[mark[0]]


def close(schedule: Schedule) -> list[Step]:
    """Add a Drop at the end of every tensor's stay in every tier.

    A stay begins when the tensor is made or copied in, and ends after the last of: its uses, the waits for its copies, and the
    references to it. Tensors that live in a farther tier stay there. Frees are derived only here.
    """
    steps = list(schedule.steps())
    drops = _drops(schedule, _uses(schedule, steps), never=len(steps))
    closed: list[Step] = list(drops.get(-1, ()))
    for i, step in enumerate(steps):
        closed.append(step)
        if i in drops:
            closed += drops[i]
    return closed


def _uses(schedule: Schedule, steps: Sequence[Step]) -> _Uses:
    """One pass over the steps; the hottest loop of planning together with `replay`."""
    home, several = schedule.home, _made_again(schedule)
    first = [-1] * (len(schedule.trace.ops) + 2)
    first[len(schedule.trace.ops)] = len(steps)
    found = _Uses(first)
    later, made_at, last, tiers = found.later, found.made_at, found.last, found.tiers
    begins, touched = tiers[home]
    for x, info in {**schedule.trace.tensors, **schedule.added}.items():
        if info.born < 0 and x not in schedule.start:
            made_at[x] = -1
            if x in several:
                begins[x] = [-1]
    for i, step in enumerate(steps):
        if isinstance(step, Run):
            if step.again:
                later[(step.op, step.again)] = i
            elif step.op >= 0:
                first[step.op] = i
            if step.stream != "compute":
                continue  # its tensors are kept for other reasons
            for x in step.writes:
                made_at[x] = i
                if x in several:
                    begins[x].append(i)
            for x in step.reads:
                last[x] = i
                if x in several:
                    touched[x].append(i)
            for x in step.mutates:
                last[x] = i
                if x in several:
                    touched[x].append(i)
        elif isinstance(step, Copy):
            _use_of_copy(found, step, i, home)
        elif isinstance(step, Collect):
            for x in step.tensors:
                last[x] = i
                if x in several:
                    touched[x].append(i)
        elif isinstance(step, Wait):
            for x in step.tensors:  # both ends of the copy are in use until here
                last[x] = i
                for begun, used in tiers.values():
                    if x in begun:
                        used[x].append(i)
    return found


def _use_of_copy(found: _Uses, step: Copy, i: int, home: str) -> None:
    source, target = found.tiers[step.src], found.tiers[step.dst]
    for x in step.tensors:
        if not (step.aside and step.src == home):
            source[1][x].append(i)
        if not (step.aside and step.dst == home):
            target[0 if step.lands else 1][x].append(i)
            if step.lands and step.dst == home:
                found.made_at[x] = i


def _drops(schedule: Schedule, found: _Uses, never: int) -> dict[int, list[Drop]]:
    """The drops after each step; -1: before the first. A stay that ends at `never` has none."""
    home = schedule.home
    drops: dict[int, list[Drop]] = defaultdict(list)
    made: dict[tuple[TensorId, str], Drop] = schedule.trace.__dict__.setdefault("_drops", {})  # reused in a search

    def let_go(x: TensorId, tier: str, end: int) -> None:
        if end < never:
            drop = made.get((x, tier))
            if drop is None:
                drop = made[x, tier] = Drop(tensor=x, tier=tier)
            drops[end].append(drop)

    begins, touched = found.tiers[home]
    first, last = found.first, found.last
    plainly, changed = schedule.trace.last_held, schedule.holds
    for x, at in found.made_at.items():
        if x in begins:  # a stay ends at the last use inside it
            until = [found.of_mark(mark) for mark in schedule.held(x)]
            _end_each(x, home, begins[x], [*touched.get(x, ()), *until], never, let_go)
            continue
        used_at = last.get(x, -1)  # a single stay, which ends at the last use
        end = used_at if used_at > at else at
        if x not in changed:
            held = first[plainly[x]]
            end = held if held > end else end
        else:
            end = max([end, *map(found.of_mark, changed[x])])
        if end < never:
            let_go(x, home, end)
    for tier, (begun, used) in found.tiers.items():
        if tier != home:
            for x, starts in begun.items():
                _end_each(x, tier, starts, used.get(x, ()), never, let_go)
    return drops


def _made_again(schedule: Schedule) -> set[TensorId]:
    """Tensors that may have several stays at home: those copied, and those that inserted steps make again."""
    found: set[TensorId] = set()
    once: set[TensorId] = set()
    plain = schedule.trace.next_id
    for steps in schedule.after.values():
        for step in steps:
            if isinstance(step, Copy):
                found.update(step.tensors)
            elif isinstance(step, Run):
                if step.op < 0:
                    found.update(step.writes)
                for x in step.writes:
                    if x < plain or x in once:
                        found.add(x)
                    once.add(x)
    return found


def _end_each(
    x: TensorId,
    tier: str,
    starts: Sequence[int],
    marks: Sequence[int],
    never: int,
    let_go: Callable[[TensorId, str, int], None],
) -> None:
    """End every stay at the last use before the next begins."""
    if len(starts) == 1:
        let_go(x, tier, max(starts[0], max(marks, default=-1)))
        return
    for start, bound in zip(starts, [*starts[1:], never + 1], strict=True):
        let_go(x, tier, max((m for m in marks if start <= m < bound), default=start))
