"""Checkmate: which ops to run again, and which outputs to carry from stage to stage, as a mixed integer program.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys 2020, arXiv 1910.02653). Its
variables: R[t,i], node i runs in stage t; S[t,i], its output is carried into stage t; U[t,k], the bytes while k runs. The
paper's Free[t,i,k] is turned round here, which gives the same programs and a tighter relaxation without large constants:

    L[t,i,k]   the output of i lies there while k runs, k being i itself or one that reads it
    L[t,i,k] >= R[t,k]     L[t,i,k] >= L[t,i,k'] for the next such k'     last L[t,i,.] >= S[t+1,i]     first <= S[t,i] + R[t,i]

Then only S has to be whole: for a whole S the fewest runs follow (`_stages.complete`). A variable that can only be zero is
not made: i is of no use after its horizon, and a fixed node runs in its own stage alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdall.actions.reschedule.dag import Answer, Dag, Program, Status, answer
from holdall.errors import InvalidInput
from holdall.planning import highs
from holdall.planning.highs import Floats, Ints, Model
from holdall.planning.stages import Limits, Staged, complete, everything, fill, greedy, improve, ruled, squeeze

Goal = Literal["cost", "peak", "saved"]
_COARSE = 10_000  # a budget of more units is scaled to as many: solvers work to absolute tolerances
_PROGRAM = 0.6  # of the time that is left, for the integer program; single steps go on from what it does not prove
_THRESHOLDS = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """The linear relaxation: a bound on the cost of every program in stages, and S as fractions (stage, node)."""

    bound: float
    carried: Floats | None  # None: there is no program, or the time was up
    status: str
    seconds: float


def solve(
    dag: Dag,
    budget: int,
    *,
    time_limit: float = 60.0,
    gap: float = 1e-4,
    loss: int | None = None,
    saved_budget: int | None = None,
    starts: Sequence[Program] = (),
) -> Answer:
    """The cheapest program in stages, to a relative `gap`, or the best one at the time limit.

    With `loss`, that node runs once and at most `saved_budget` is live right after it. `starts`: programs to begin with.
    """
    began = time.perf_counter()
    until = began + time_limit
    dag, limits = ruled(dag, budget, loss, saved_budget)

    def done(staged: Staged | None, bound: float, status: Status) -> Answer:
        spent = time.perf_counter() - began
        return answer(dag, staged.program if staged else None, bound=bound, status=status, seconds=spent)

    def left() -> float:
        return max(until - time.perf_counter(), 0.1)

    if dag.floor > budget:
        return done(None, inf, "infeasible")
    best = greedy(dag, limits, starts=starts, until=until)
    if best and best.program == dag.once:
        return done(best, best.seen.seconds, "optimal")
    rounded, bound, status = _round(dag, limits, shares=(1.0, 0.9), tries=20, seed=0, mend=True, time_limit=left() / 2)
    if status == "infeasible":
        return done(None, inf, "infeasible")
    best = min((b for b in (best, rounded) if b), key=lambda b: b.seen.seconds, default=None)
    if best and _met(best, bound, gap):
        return done(best, bound, "optimal")
    mip = Mip(dag, limits)
    found = highs.solve(mip.model, time_limit=_PROGRAM * left(), gap=gap, start=mip.start(best) if best else None)
    if found.x is None and found.status == "infeasible" and best is None:
        return done(None, bound, "infeasible")
    if found.x is not None:
        bound = max(bound, found.bound * mip.cost_unit)
        whole = complete(dag, mip.carried(found.x))
        staged = squeeze(whole, limits, until=until + 1.0)  # rounded to whole numbers, it may be some bytes too large
        best = min((b for b in (best, staged) if b and limits.allow(b)), key=lambda b: b.seen.seconds, default=None)
    if best is None:
        return done(None, bound, "unknown")
    if not _met(best, bound, gap):
        best = improve(best, limits, until=until)
    return done(best, bound, "optimal" if _met(best, bound, gap) else "feasible")


def least(
    dag: Dag,
    goal: Literal["peak", "saved"] = "peak",
    *,
    budget: int | None = None,
    loss: int | None = None,
    time_limit: float = 60.0,
    gap: float = 1e-4,
) -> Answer:
    """The program in stages with the least peak, or, within a budget, the least live right after `loss`.

    `bound` and `gap` of this answer count bytes: of the peak, or of what is live after the loss.
    """
    began = time.perf_counter()
    if (goal == "saved") != (loss is not None):
        raise InvalidInput(f"the goal is `{goal}` and `loss` is {loss}", hint="a `loss` belongs to the goal `saved`")
    plain = everything(dag)
    most = plain.seen.peak if budget is None else budget
    dag, limits = ruled(dag, most, loss, None if loss is None else sum(dag.size))
    mip = Mip(dag, limits, goal)
    start = mip.start(plain) if limits.allow(plain) else None
    found = highs.solve(mip.model, time_limit=time_limit, gap=gap, start=start)
    staged = None if found.x is None else complete(dag, mip.carried(found.x))
    if staged is None or not limits.allow(staged):
        staged = plain if limits.allow(plain) else None
    if staged is None:
        status: Status = "infeasible" if found.status == "infeasible" else "unknown"
        return answer(
            dag, None, bound=inf if status == "infeasible" else 0.0, status=status, seconds=time.perf_counter() - began
        )
    held = staged.seen.peak if loss is None else staged.seen.after[staged.program.index(loss)]
    bound = min(max(found.bound * mip.unit, 0.0), float(held))
    return Answer(
        program=staged.program,
        cost=staged.seen.seconds,
        bound=bound,
        gap=(held - bound) / held if held else 0.0,
        status="optimal" if found.status == "optimal" else "feasible",
        seconds=time.perf_counter() - began,
    )


def relax(
    dag: Dag,
    budget: int,
    *,
    time_limit: float = 60.0,
    loss: int | None = None,
    saved_budget: int | None = None,
) -> Relaxed:
    """The linear relaxation of `solve`."""
    return _relax(*ruled(dag, budget, loss, saved_budget), time_limit)


def _relax(dag: Dag, limits: Limits, time_limit: float) -> Relaxed:
    if dag.floor > limits.budget:
        return Relaxed(bound=inf, carried=None, status="infeasible", seconds=0.0)
    mip = Mip(dag, limits)
    found = highs.solve(mip.model, time_limit=time_limit, relaxed=True)
    carried = None if found.x is None else mip.fractions(found.x)
    return Relaxed(bound=found.bound * mip.cost_unit, carried=carried, status=found.status, seconds=found.seconds)


def round_lp(
    dag: Dag,
    budget: int,
    *,
    shares: Sequence[float] = (1.0, 0.9),
    tries: int = 100,
    seed: int = 0,
    mend: bool = True,
    time_limit: float = 60.0,
    loss: int | None = None,
    saved_budget: int | None = None,
) -> Answer:
    """The paper's two phases: relax, round S (nine thresholds, then `tries` random roundings), follow S, keep the cheapest.

    `shares` of the budget are relaxed in turn; a share below one leaves room for what rounding adds. `mend`, which is not in
    the paper: what does not fit carries less until it does, and the winner carries more where there is room.
    """
    began = time.perf_counter()
    dag, limits = ruled(dag, budget, loss, saved_budget)
    best, bound, lp = _round(dag, limits, shares=shares, tries=tries, seed=seed, mend=mend, time_limit=time_limit)
    spent = time.perf_counter() - began
    if best is None:
        return answer(dag, None, bound=bound, status="infeasible" if lp == "infeasible" else "unknown", seconds=spent)
    status: Status = "optimal" if _met(best, bound, 0.0) else "feasible"
    return answer(dag, best.program, bound=bound, status=status, seconds=spent)


def _round(
    dag: Dag, limits: Limits, *, shares: Sequence[float], tries: int, seed: int, mend: bool, time_limit: float
) -> tuple[Staged | None, float, str]:
    """(the cheapest rounding that fits, a bound for the whole budget, the status of its relaxation)."""
    until = time.perf_counter() + time_limit
    best: Staged | None = None
    bound, status = float(sum(dag.cost)), "unknown"
    for share in shares:
        left = until - time.perf_counter()
        if left <= 0 or status == "infeasible":
            break
        relaxed = _relax(dag, replace(limits, budget=int(limits.budget * share)), left)
        if share == 1.0:
            bound, status = max(bound, relaxed.bound), relaxed.status
        if relaxed.carried is None:
            continue
        for tried, staged in enumerate(_roundings(dag, relaxed.carried, tries, seed)):
            if tried and time.perf_counter() > until:
                break
            if best and staged.seen.seconds >= best.seen.seconds:
                continue
            mended = squeeze(staged, limits, until=until) if mend else staged
            if limits.allow(mended) and (best is None or mended.seen.seconds < best.seen.seconds):
                best = mended
    return fill(best, limits, until=until) if best and mend else best, bound, status


class Mip:
    """The program of the module's docstring for one graph and budget. Arrays of columns are [stage, node]; -1: is zero."""

    def __init__(self, dag: Dag, limits: Limits, goal: Goal = "cost") -> None:
        self.dag, self.limits, self.model = dag, limits, Model()
        self.unit = _unit(dag, limits)
        self.cost_unit = (sum(dag.cost) / len(dag)) or 1.0
        n = len(dag)
        self.run = np.full((n + 1, n), -1)
        self.carry = np.full((n + 1, n), -1)
        self.held = np.full((n, n), -1)
        self._lie: dict[tuple[int, int], tuple[Ints, Ints]] = {}  # (i, k) -> L over the stages of k, and what follows it
        self._first = np.full((n + 1, n), -1)  # the first L of a stage
        for i in range(n):
            self._choices(i, goal)
        for i in range(n):
            self._lives(i)
        self._memory()
        self._limits(goal)

    def stages(self, i: int) -> Ints:
        """The stages in which node i may run."""
        return np.arange(i, i + 1 if i in self.dag.fixed else min(self.dag.horizon[i], len(self.dag) - 1) + 1)

    def carried(self, x: Floats) -> list[int]:
        return _as_sets(self.fractions(x) > 0.5)

    def fractions(self, x: Floats) -> Floats:
        """S as the solution has it."""
        return np.where(self.carry >= 0, np.take(x, np.maximum(self.carry, 0)), 0.0)

    def start(self, staged: Staged) -> tuple[Ints, Floats]:
        """The whole columns of a program, for the solver to begin with."""
        t, i = np.nonzero(self.carry >= 0)
        values = [float(staged.carried[a] >> b & 1) for a, b in zip(t.tolist(), i.tolist(), strict=True)]
        return self.carry[t, i], np.asarray(values)

    def _choices(self, i: int, goal: Goal) -> None:
        """R and S of a node."""
        dag, n = self.dag, len(self.dag)
        ts = self.stages(i)
        cost = dag.cost[i] / self.cost_unit if goal == "cost" else 0.0
        self.run[ts, i] = self.model.add_columns(len(ts), cost=cost, lower=ts == i)
        ts = np.arange(i + 1, dag.horizon[i] + 1)
        sure = ts == n  # it is kept
        if i in dag.fixed:  # it lies there until all have read it once
            sure |= ts <= max(dag.users[i], default=0)
        self.carry[ts, i] = self.model.add_columns(len(ts), lower=sure, whole=True)

    def ends(self, i: int) -> Ints:
        """By stage, the column for "there as the stage ends"."""
        return np.append(self.carry[1:, i], -1)

    def _lives(self, i: int) -> None:
        """L of a node, from the last of its readers to itself."""
        after = self.ends(i)  # by stage, the column for "there after this"
        for k in (*reversed(self.dag.users[i]), i):
            ts = self.stages(k)
            lie = self.model.add_columns(len(ts))
            self._lie[i, k] = lie, after[ts]
            self.model.add_rows([(lie, 1.0), (self.run[ts, k], -1.0)], lower=0.0)
            more = after[ts] >= 0
            self.model.add_rows([(lie[more], 1.0), (after[ts][more], -1.0)], lower=0.0)
            after[ts] = lie
        self._first[:, i] = after
        ts = np.nonzero(after[:-1] >= 0)[0]
        self.model.add_rows([(after[ts], -1.0), (self.carry[ts, i], 1.0), (self.run[ts, i], 1.0)], lower=0.0)

    def _memory(self) -> None:
        """U, each run's from the one before it in the stage: what came and what went in between."""
        dag, n = self.dag, len(self.dag)
        size = np.asarray(dag.size) / self.unit
        there = self.run[:n] >= 0
        t, k = np.nonzero(there)
        self.held[t, k] = self.model.add_columns(len(t), upper=self.limits.budget / self.unit)
        row = np.full((n, n), -1)
        before = np.full(len(t), -1)
        before[1:] = np.where(t[1:] == t[:-1], self.held[t, k][:-1], -1)
        row[t, k] = self.model.add_rows([(self.held[t, k], 1.0), (before, -1.0)], lower=0.0, upper=0.0)
        following = np.full((n, n), -1)
        following[t[:-1], k[:-1]] = np.where(t[1:] == t[:-1], row[t, k][1:], -1)
        self.opening = opening = row[np.arange(n), there.argmax(axis=1)]  # the row of each stage's first run
        for i in range(n):  # what lies there as the stage begins: if i cannot run in it, all that it will need
            at_start = np.where(there[:, i], self.carry[:n, i], self._first[:n, i])
            self.model.add_entries(opening, at_start, -size[i])
        for (i, reader), (lie, after) in self._lie.items():
            ts = self.stages(reader)
            if i == reader:
                self.model.add_entries(row[ts, i], lie, -size[i])
                self.model.add_entries(row[ts, i], self.carry[ts, i], size[i])
            later = following[ts, reader]
            more = later >= 0
            self.model.add_entries(later[more], lie[more], size[i])
            self.model.add_entries(later[more], after[more], -size[i])

    def _limits(self, goal: Goal) -> None:
        dag, limits = self.dag, self.limits
        t, k = np.nonzero(self.held >= 0)
        extra = np.asarray(dag.extra)[k] / self.unit
        if goal == "cost":
            t, k, extra = t[extra > 0], k[extra > 0], extra[extra > 0]  # the others' columns end at the budget
        top = np.repeat(self.model.add_columns(1, cost=float(goal == "peak"), upper=limits.budget / self.unit), len(t))
        self.model.add_rows([(top, 1.0), (self.held[t, k], -1.0), (self.run[t, k], -extra)], lower=0.0)
        if limits.loss is not None and limits.saved is not None:
            saved = self.model.add_columns(1, cost=float(goal == "saved"), upper=limits.saved / self.unit)
            row = np.repeat(self.model.add_rows([(saved, 1.0)], lower=0.0), len(dag))
            self.model.add_entries(row, self.carry[limits.loss + 1], -np.asarray(dag.size) / self.unit)


def _met(staged: Staged, bound: float, gap: float) -> bool:
    """Whether the program costs no more than the bound, to the gap and a solver's precision."""
    return staged.seen.seconds - bound <= max(gap, 1e-6) * staged.seen.seconds


def _roundings(dag: Dag, carried: Floats, tries: int, seed: int) -> Iterator[Staged]:
    """S rounded, each different one once."""
    rng = np.random.default_rng(seed)
    seen: set[tuple[int, ...]] = set()
    cuts = [np.full(carried.shape, c) for c in _THRESHOLDS]
    for at in (*cuts, *(rng.random(carried.shape) for _ in range(tries))):
        staged = complete(dag, _as_sets(carried > at))
        if staged.carried not in seen:
            seen.add(staged.carried)
            yield staged


def _unit(dag: Dag, limits: Limits) -> float:
    """The bytes that count as one: what divides all sizes, unless that leaves too many."""
    whole = gcd(*dag.size, *dag.extra) or 1
    return max(whole, limits.budget / _COARSE)


def _as_sets(carried: NDArray[np.bool_]) -> list[int]:
    """Rows of yes and no as sets of nodes."""
    return [sum(1 << int(i) for i in np.nonzero(row)[0]) for row in carried]
