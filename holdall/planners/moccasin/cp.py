"""Moccasin: each output is held during at most a few retention intervals, found by constraint programming.

Bartan et al., "Moccasin: Efficient Tensor Rematerialization for Neural Networks" (ICML 2023, PMLR 202:1826). The programs are
Checkmate's, but time is a grid of events: stage j has one for each node k <= j, in their order, and node k can only begin
at its own. An output is held from the event at which it is made to its last reader's; `copies` of these intervals per node are
all the freedom there is, so variables grow with the nodes and not with their square. A budget that needs more runs
of a node than `copies` is infeasible here.

Two phases: a point within the budget first, by least peak where single steps (`planning/stages.py`) do not reach one; then the
cheapest, with that point as a hint. Where the time ends before the proof, single steps go on from the best point.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, gcd, inf
from typing import Any

from holdall.actions.reschedule.dag import Answer, Dag, Program, Status, answer, fits
from holdall.errors import InvalidInput, Unsupported
from holdall.planning.stages import Limits, fill, improve, in_stages, nearest, ruled

_FINE = 1_000_000  # steps in which costs that are no whole numbers are counted, over the dearest node
_FIRST = 0.8  # of the time that is left, at most, for the first phase: without its point there is nothing to improve
_GREEDY = 0.25  # of the time, at most, for the steps before it
_SECOND = 0.7  # of the time that is left, for the second phase; the rest is for single steps
_IN_VAIN = 60  # rounds of steps that come no closer to the budget before the first phase begins


def solve(
    dag: Dag,
    budget: int,
    *,
    copies: int = 2,
    time_limit: float = 60.0,
    workers: int = 2,
    seed: int = 0,
    loss: int | None = None,
    saved_budget: int | None = None,
    starts: Sequence[Program] = (),
) -> Answer:
    """The cheapest program in stages that runs no node more than `copies` times, or the best one at the time limit.

    With `loss`, that node runs once and at most `saved_budget` is live right after it. `starts`: programs to begin with.
    """
    began = time.perf_counter()
    if copies < 1:
        raise InvalidInput(f"`copies` is {copies}", hint="each node has to run once")
    _solver()
    dag, limits = ruled(dag, budget, loss, saved_budget)

    def done(program: Program | None, bound: float, status: Status) -> Answer:
        return answer(dag, program, bound=bound, status=status, seconds=time.perf_counter() - began)

    if dag.floor > budget:
        return done(None, inf, "infeasible")
    until = began + time_limit
    limits = replace(limits, copies=copies)
    near = nearest(dag, limits, starts=starts, until=began + _GREEDY * time_limit)
    if not limits.allow(near):
        near = improve(near, limits, until=began + _GREEDY * time_limit, rounds=_IN_VAIN, seed=seed)
    first = near.program if limits.allow(near) else None
    if first == dag.once:
        return done(first, float(sum(dag.cost)), "optimal")
    search = _Search(dag, limits, copies=copies, workers=workers, seed=seed)
    if first is None:
        found = search.run(_FIRST * (until - time.perf_counter()), hint=near.program, least_peak=True)
        if found.program is None or not fits(dag, found.program, budget, loss=loss, saved_budget=saved_budget):
            return done(None, inf if found.solved else float(sum(dag.cost)), "infeasible" if found.solved else "unknown")
        first = fill(in_stages(dag, found.program), limits, until=until).program
    found = search.run(_SECOND * (until - time.perf_counter()), hint=first)
    best = in_stages(dag, first if found.program is None else found.program)
    if found.solved:
        return done(best.program, found.bound, "optimal")
    return done(improve(best, limits, until=until, seed=seed).program, found.bound, "feasible")


@dataclass(frozen=True, kw_only=True)
class _Found:
    program: Program | None
    bound: float
    solved: bool  # to the end: the program is the best, or there is none


@dataclass(frozen=True, kw_only=True)
class _Interval:
    """One retention interval of the model; `present` is None for a first run, which always is."""

    start: Any
    end: Any
    present: Any
    hint: tuple[int, int]  # where the hint has it, and whether it does
    hinted: bool


class _Search:
    """The model of one graph, built anew for each phase."""

    def __init__(self, dag: Dag, limits: Limits, *, copies: int, workers: int, seed: int) -> None:
        self.dag, self.limits, self.copies, self.workers, self.seed = dag, limits, copies, workers, seed
        self.stride = len(dag) + 1  # the last event of a stage is nobody's
        self.unit = gcd(*dag.size, *dag.extra) or 1
        self.weights, self.weight = _weights(dag)

    def event(self, stage: int, node: int) -> int:
        """When a node may begin in a stage. All stages are as long as the last: so a start is a multiple of its stage."""
        return stage * self.stride + node

    def stages(self, node: int) -> range:
        last = node if node in self.dag.fixed else min(self.dag.horizon[node], len(self.dag) - 1)
        return range(node, last + 1)

    def run(self, time_limit: float, *, hint: Program, least_peak: bool = False) -> _Found:
        """The cheapest program, or with `least_peak` one that passes the budget by as little as can be."""
        cp_model = _solver()
        model = cp_model.CpModel()
        hints = self._shape(hint)
        held = [self._intervals(model, v, hints[v]) for v in range(len(self.dag))]
        for v, deps in enumerate(self.dag.deps):
            for u in deps:
                self._reads(model, held[u], held[v])
        top = self._memory(model, held, least_peak)
        again = [(self.weights[v], x.present) for v, xs in enumerate(held) for x in xs[1:]]
        cost = sum(w * p for w, p in again)
        model.minimize(top if least_peak else cost)
        solver = cp_model.CpSolver()
        limits = solver.parameters
        limits.max_time_in_seconds = max(time_limit, 0.1)
        limits.num_workers, limits.random_seed = self.workers, self.seed
        limits.interleave_search = True  # all strategies in turns, also of one worker; the same answer for any speed of theirs
        status = solver.solve(model)
        solved = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Found(program=None, bound=inf if solved else float(sum(self.dag.cost)), solved=solved)
        runs = [
            (solver.value(x.start), v) for v, xs in enumerate(held) for x in xs if x.present is None or solver.value(x.present)
        ]
        bound = sum(self.dag.cost) + solver.best_objective_bound / self.weight
        return _Found(program=tuple(v for _, v in sorted(runs)), bound=bound, solved=solved)

    def _intervals(self, model: Any, v: int, hints: Sequence[tuple[int, int]]) -> list[_Interval]:
        """The intervals of a node, in order of time; each ends where one of its readers has run."""
        dag, n = self.dag, len(self.dag)
        ends = {self.event(j, u) + 1 for u in dag.users[v] for j in self.stages(u)}
        if v in dag.keep:
            ends.add(self.event(n, 0))
        first = self.event(v, v)
        end = model.new_int_var(first + 1, max(ends, default=first + 1), f"end{v}")
        found = [_Interval(start=first, end=end, present=None, hint=hints[0], hinted=True)]
        model.add_hint(found[0].end, hints[0][1])
        stages = self.stages(v)
        for c in range(1, min(self.copies, len(stages))):
            stage = model.new_int_var(stages[c], stages[-1], f"stage{v}.{c}")
            start = stage * self.stride + v
            late = [e for e in ends if e > self.event(stages[c], v)]
            end = model.new_int_var(min(late), max(late), f"end{v}.{c}")
            present = model.new_bool_var(f"present{v}.{c}")
            model.add(found[-1].end <= start).only_enforce_if(present)
            model.add(stage == stages[c]).only_enforce_if(~present)  # an interval that is not there has one shape only
            model.add(end == min(late)).only_enforce_if(~present)
            if c > 1:
                model.add_implication(present, found[-1].present)
            there = c < len(hints)
            hint = hints[c] if there else (self.event(stages[c], v), min(late))
            model.add_hint(present, there)
            model.add_hint(stage, hint[0] // self.stride)
            model.add_hint(end, hint[1])
            found.append(_Interval(start=start, end=end, present=present, hint=hint, hinted=there))
        if v in dag.keep:
            for x, following in zip(found, [*found[1:], None], strict=True):
                last = [] if x.present is None else [x.present]
                last += [] if following is None else [~following.present]
                model.add(x.end == self.event(n, 0)).only_enforce_if(last)
        return found

    def _reads(self, model: Any, made: Sequence[_Interval], read: Sequence[_Interval]) -> None:
        """Whenever the reader runs, one of the intervals holds what it reads."""
        for y in read:
            choices = []
            for x in made:
                chosen = model.new_bool_var("")
                model.add_hint(chosen, x.hinted and y.hinted and x.hint[0] < y.hint[0] < x.hint[1])
                model.add(x.start + 1 <= y.start).only_enforce_if(chosen)
                model.add(x.end >= y.start + 1).only_enforce_if(chosen)
                if x.present is not None:
                    model.add_implication(chosen, x.present)
                choices.append(chosen)
            model.add_bool_or(choices if y.present is None else [*choices, ~y.present])

    def _memory(self, model: Any, held: Sequence[Sequence[_Interval]], least_peak: bool) -> Any:
        """All intervals within the capacity, which is returned: the budget, or what is to be made small."""
        dag, budget = self.dag, self.limits.budget // self.unit
        intervals, sizes = [], []
        for v, xs in enumerate(held):
            for x in xs:
                for bytes_, end in ((dag.size[v], x.end), (dag.extra[v], x.start + 1)):
                    if bytes_:
                        intervals.append(_interval(model, x, end, self.event(len(dag), 0)))
                        sizes.append(bytes_ // self.unit)
        most = sum(dag.size) + max(dag.extra)
        top = model.new_int_var(budget, max(budget, most // self.unit), "top") if least_peak else budget
        loss, saved = self.limits.loss, self.limits.saved
        if loss is not None and saved is not None and saved < self.limits.budget:
            free = self.event(loss, len(dag))  # nothing begins here: what lies here is what is saved
            intervals.append(model.new_fixed_size_interval_var(free, 1, "saved"))
            sizes.append(budget - saved // self.unit)
        model.add_cumulative(intervals, sizes, top)
        return top

    def _shape(self, program: Program) -> list[list[tuple[int, int]]]:
        """The intervals of a program in stages, by node: (start, end), each held to its last reader."""
        stage = -1
        found: list[list[tuple[int, int]]] = [[] for _ in self.dag.cost]
        for v in program:
            stage = max(stage, v)
            at = self.event(stage, v)
            for u in self.dag.deps[v]:
                found[u][-1] = (found[u][-1][0], at + 1)
            found[v].append((at, at + 1))
        for v in self.dag.keep:
            found[v][-1] = (found[v][-1][0], self.event(len(self.dag), 0))
        return found


def _interval(model: Any, x: _Interval, end: Any, horizon: int) -> Any:
    if x.present is None:
        return model.new_interval_var(x.start, end - x.start, end, "")
    size = model.new_int_var(1, horizon, "")
    model.add_hint(size, x.hint[1] - x.hint[0])
    return model.new_optional_interval_var(x.start, size, end, x.present, "")


def _weights(dag: Dag) -> tuple[list[int], float]:
    """Costs as whole numbers, rounded down so that bounds stay bounds, and how many make one."""
    if all(float(c).is_integer() for c in dag.cost):
        shared = gcd(*(int(c) for c in dag.cost)) or 1
        return [int(c) // shared for c in dag.cost], 1.0 / shared
    scale = _FINE / max(dag.cost)
    return [floor(c * scale) for c in dag.cost], scale


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        if "highspy" in sys.modules:  # both bring a library of the same name, see `_highs`
            raise Unsupported("moccasin cannot be used after `highspy` in one process", hint="pip install scipy") from error
        raise Unsupported("moccasin needs the package `ortools`", hint='pip install "holdall[solvers]"') from error
    return cp_model
