"""Shared by the online policies: the plan is one `evict`, simulated on the trace, or empty where plain training fits.

An online policy is not monotone: with more memory it sometimes decides worse. Planning therefore also simulates it at a few
thresholds below the budget, and keeps the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from holdall.actions.evict import Evict
from holdall.errors import HoldallError, Infeasible, Unsupported
from holdall.planning.finish import finish, over_budget, usable_bytes
from holdall.simulator import simulate
from holdall.types import Plan, Planner, Problem, Schedule
from holdall.types.layout import block_of
from holdall.units import format_bytes

_STEPS = 12  # steps of the search for a budget that works
_GRID = 16  # thresholds between the bytes in use before a step and plain training's peak

MakeAction = Callable[[Evict, int], Evict]  # (rates and budget, bytes of the arena) -> the planner's own policy


def plan_online(planner: Planner, problem: Problem, make: MakeAction, *, always: bool) -> Plan:
    """`always`: install the policy even where plain training fits, for loops that differ from their trace."""
    began = time.perf_counter()
    about = problem.trace.about
    if about.head or about.precision:
        raise Unsupported(
            f"`{planner.name}` does not support working copies or a chunked head, and this trace has one of them",
            hint='trace without `precision`, and with head="whole"',
        )
    plain = simulate(problem, [])
    fits_plainly = not over_budget(problem, plain)
    if fits_plainly and not always:
        return finish(planner, problem, [], why=["plain training fits the budget: nothing is evicted"], began=began)
    try:
        return _plan(planner, problem, make, plain.peak[problem.home], began)
    except Infeasible as error:
        if fits_plainly:
            raise
        smallest = _search(problem, make, plain.peak[problem.home])
        error.smallest = smallest
        raise Infeasible(
            f"no plan of `{planner.name}` fits {format_bytes(problem.limit(problem.home))} of {problem.home}; "
            f"the smallest found needs {format_bytes(smallest)}",
            hint=f"use a budget of at least {smallest} bytes",
            smallest=smallest,
        ) from error


def _plan(planner: Planner, problem: Problem, make: MakeAction, plain: int, began: float) -> Plan:
    best = _best(problem, make, plain)
    if best is None:
        raise Infeasible("the policy does not stay within the budget")
    counts = best.rehearse(Schedule(trace=problem.trace, home=problem.home)).counts
    why = [
        f"simulated: {counts.evictions} evictions, {counts.reruns} ops recomputed, "
        f"{counts.again / max(1, counts.useful):.1%} of the step's work by the policy's clock",
        "decisions are made during the step, so steps may differ from the trace; their peak is the budget",
    ]
    if best.budget < problem.limit(problem.home):
        why.append(f"evicting from {format_bytes(best.budget)} on is predicted faster than evicting at the budget")
    return finish(planner, problem, [best], why=why, began=began)


def _best(problem: Problem, make: MakeAction, plain: int) -> Evict | None:
    """The fastest fitting policy at the budget and at thresholds below it."""
    limit = _usable(problem, problem.limit(problem.home))
    before = _before(problem)
    rungs = [before + (plain - before) * n // _GRID for n in range(_GRID + 1)]
    tried = [limit, *[r for r in reversed(rungs) if before < r < limit][:3]]
    found: list[tuple[float, int, Evict]] = []
    for budget in tried:
        action = _at(problem, make, budget)
        seconds = _seconds(problem, action) if action is not None else None
        if action is not None and seconds is not None:
            found.append((seconds, -budget, action))
    return min(found, key=lambda f: f[:2])[2] if found else None


def _seconds(problem: Problem, action: Evict) -> float | None:
    """Seconds of a step under the policy; None: it exceeds the budget."""
    try:
        if action.rehearse(Schedule(trace=problem.trace, home=problem.home)).counts.over:
            return None
        outcome = simulate(problem, [action])
    except HoldallError:
        return None
    return None if over_budget(problem, outcome) else outcome.seconds


def _at(problem: Problem, make: MakeAction, budget: int) -> Evict | None:
    before = _before(problem)
    if budget <= before:
        return None
    hardware = problem.hardware
    rate = max(hardware.flops.values()) * hardware.efficiency
    base = Evict(
        budget=budget,
        align=block_of(hardware.device),
        flops=rate,
        bandwidth=hardware.bandwidth,
        overhead=hardware.overhead,
    )
    return make(base, budget - before)


def _search(problem: Problem, make: MakeAction, plain: int) -> int:
    """A small budget that works; by bisection, because the policy is nearly monotone."""
    low, high = min(_before(problem), plain), plain
    for _ in range(_STEPS):
        if high - low <= max(1, plain // 1000):
            break
        middle = (low + high) // 2
        tried = replace(problem, budget={**problem.budget, problem.home: middle})
        if _best(tried, make, plain) is not None:
            high = middle
        else:
            low = middle
    return high


def _before(problem: Problem) -> int:
    return sum(t.nbytes for t in problem.trace.tensors.values() if t.born < 0)


def _usable(problem: Problem, limit: int) -> int:
    """Bytes that the policy may fill: the limit without workspaces and the allocator's slack."""
    workspace = max((op.workspace for op in problem.trace.ops), default=0)
    return usable_bytes(problem, limit) - workspace


def least_for(given: int | None, arena: int, usual: int) -> int:
    """Storages below this many bytes are never evicted: the published figure, or a thousandth of the arena if less."""
    return given if given is not None else min(usual, arena // 1000)


def scores_among(names: Sequence[str], given: str) -> str:
    """The score asked for, if it is one of these."""
    from holdall.errors import unknown_name

    if given not in names:
        raise unknown_name("score", given, names)
    return given
