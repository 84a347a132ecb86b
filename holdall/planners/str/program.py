"""STR's integer program: Checkmate's, with copies to the host and back.

Besides R (a node runs in a stage) and S (its output is carried into a stage; see `checkmate/ilp.py`), for every stage t:

    O[t,i]   the output of i is copied out: it is there until the stage ends
    P[t,i]   the host has a copy: P[t,i] <= P[t-1,i] + O[t-1,i]
    I[t,i]   it is copied in, from P[t,i]: its bytes count from the beginning of the stage, and it is carried into the next

Copies of a stage are hidden by the stage's computation, each way; the rest is waited for:

    bytes of O[t] / rate <= seconds of R[t] + stall[t]      and the same for I        minimise seconds of all R + all stalls

Where copies and computation do not overlap, the stall is all of the copies' time.

A host copy stays until the end. So one copy out serves several copies in, and a recomputation may start from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from holdall.actions.reschedule.dag import Dag
from holdall.errors import InvalidInput
from holdall.planners.checkmate.ilp import Goal, Mip
from holdall.planning import highs
from holdall.planning.highs import Floats, Ints
from holdall.planning.stages import Limits

_IN_VAIN = 1e-5  # of all computation: what all copies together cost besides their time, so that none is made in vain


Nodes = frozenset[int]


class LinkRates(NamedTuple):
    """Bytes per second each way; 0: no link."""

    out: float
    into: float
    hidden: bool = True  # by computation; else everything waits for copies

    def seconds(self, work: float, out: float, into: float) -> float:
        """Of a stage with so much computation, and bytes that are copied."""
        copies = [nbytes / rate if nbytes else 0.0 for nbytes, rate in ((out, self.out), (into, self.into))]
        return max(work, *copies) if self.hidden else work + sum(copies)


@dataclass(frozen=True, kw_only=True)
class SwapStage:
    """One stage: outputs that are there as it begins, nodes that run in it, and outputs that are copied beside them."""

    carried: Nodes
    runs: tuple[int, ...]
    out: Nodes = frozenset()
    into: Nodes = frozenset()


@dataclass(frozen=True, kw_only=True)
class SwapAnswer:
    """The best stages that were found; none: there are none, or the time was up. `bound`: no stages take less time."""

    stages: tuple[SwapStage, ...] = ()
    seconds: float = inf
    bound: float = 0.0

    @property
    def gap(self) -> float:
        return max(0.0, self.seconds - self.bound) / self.seconds if self.stages and self.seconds else 0.0


def optimum(
    dag: Dag,
    budget: int,
    link: LinkRates,
    *,
    movable: Collection[int] | None = None,
    leave: Collection[int] | None = None,
    come: Collection[int] | None = None,
    reuse: bool = True,
    time_limit: float = 60.0,
    gap: float = 1e-6,
) -> SwapAnswer:
    """The fastest stages within the budget. `movable`: outputs that may leave. `leave`, `come`: stages in which outputs are
    copied out, and in. None: all. Without `reuse`, every copy in needs a copy out of its own."""
    every = range(len(dag))
    if dag.floor > budget:
        return SwapAnswer(bound=inf)
    may_move, may_leave, may_come = (frozenset(every if given is None else given) for given in (movable, leave, come))
    program = _SwapMip(dag, budget, link, may_move, may_leave, may_come, reuse=reuse)
    found = highs.solve(program.model, time_limit=time_limit, gap=gap)
    if found.x is None:
        return SwapAnswer(bound=inf if found.status == "infeasible" else max(0.0, found.bound * program.cost_unit))
    stages = program.stages_of(found.x)
    return SwapAnswer(stages=stages, seconds=replayed(dag, stages, link)[1], bound=found.bound * program.cost_unit)


class _SwapMip(Mip):
    """Checkmate's program with the columns O, I, P, the stalls, and E: an output is there as the stage ends."""

    def __init__(
        self, dag: Dag, budget: int, link: LinkRates, movable: Nodes, leave: Nodes, come: Nodes, *, reuse: bool
    ) -> None:
        n = len(dag)
        self.link, self.leave, self.come, self.reuse = link, leave, come, reuse
        self.movable = movable if link.out and link.into else Nodes()
        self.out, self.into, self.host, self.end = (np.full((n + 1, n), -1) for _ in range(4))
        super().__init__(dag, Limits(budget=budget))

    def _choices(self, i: int, goal: Goal) -> None:  # noqa: ARG002
        dag, n, model = self.dag, len(self.dag), self.model
        ts = self.stages(i)
        self.run[ts, i] = model.add_columns(len(ts), cost=dag.cost[i] / self.cost_unit, lower=ts == i)
        last = dag.horizon[i]
        ts = np.arange(i + 1, last + 1)
        sure = ts == n  # it is kept
        if i in dag.fixed and i not in self.movable:  # it lies there until all have read it
            sure |= ts <= max(dag.users[i], default=0)
        self.carry[ts, i] = model.add_columns(len(ts), lower=sure, whole=True)
        self.end[ts - 1, i] = self.carry[ts, i]
        if i in self.movable and last > i + 1:
            self._copies(i, last)

    def _copies(self, i: int, last: int) -> None:
        model = self.model
        leaves, comes = np.arange(i, last - 1), np.arange(i + 1, last)
        price = _IN_VAIN * len(self.dag) * self.dag.size[i] / (sum(self.dag.size) or 1)
        for columns, ts, may in ((self.out, leaves, self.leave), (self.into, comes, self.come)):
            columns[ts, i] = model.add_columns(len(ts), cost=price, upper=[float(t in may) for t in ts.tolist()], whole=True)
        self.host[comes, i] = model.add_columns(len(comes))
        supply = [(self.host[comes, i], 1.0), (self.host[comes - 1, i], -1.0), (self.out[comes - 1, i], -1.0)]
        model.add_rows(supply if self.reuse else [*supply, (self.into[comes - 1, i], 1.0)], upper=0.0)
        model.add_rows([(self.into[comes, i], 1.0), (self.host[comes, i], -1.0)], upper=0.0)
        ends = np.arange(i, last)
        self.end[ends, i] = model.add_columns(len(ends))
        model.add_rows([(self.end[ends, i], 1.0), (self.carry[ends + 1, i], -1.0), (self.into[ends, i], 1.0)], lower=0.0)
        model.add_rows([(self.end[leaves, i], 1.0), (self.out[leaves, i], -1.0)], lower=0.0)

    def ends(self, i: int) -> Ints:
        return self.end[:, i].copy()

    def _memory(self) -> None:
        super()._memory()
        size = np.asarray(self.dag.size) / self.unit
        for i in self.movable:
            self.model.add_entries(self.opening, self.into[: len(self.dag), i], -size[i])

    def _limits(self, goal: Goal) -> None:
        super()._limits(goal)
        n, size = len(self.dag), np.asarray(self.dag.size) / self.cost_unit
        cost = np.asarray(self.dag.cost) / self.cost_unit
        for t in [t for t in range(n) if (self.out[t] >= 0).any() or (self.into[t] >= 0).any()]:
            stall = self.model.add_columns(1, cost=1.0, upper=inf)
            copies = [(self.out[t], size / self.link.out), (self.into[t], size / self.link.into)]
            for together in [[c] for c in copies] if self.link.hidden else [copies]:
                row = np.repeat(self.model.add_rows([(stall, 1.0)], lower=0.0), n)
                if self.link.hidden:
                    self.model.add_entries(row, self.run[t], cost)
                for columns, seconds in together:
                    self.model.add_entries(row, columns, -seconds)

    def stages_of(self, x: Floats) -> tuple[SwapStage, ...]:
        """The solution's stages, with the fewest runs."""
        n = len(self.dag)

        def chosen(columns: Ints) -> list[Nodes]:
            return [frozenset(i for i in range(n) if row[i] >= 0 and x[row[i]] > 0.5) for row in columns]

        return staged(self.dag, chosen(self.carry), chosen(self.out)[:n], chosen(self.into)[:n])


def staged(dag: Dag, carried: Sequence[Nodes], out: Sequence[Nodes], into: Sequence[Nodes]) -> tuple[SwapStage, ...]:
    """The stages with these copies and carried outputs (one set more than stages), each with the fewest runs."""
    found = []
    for t in range(len(dag)):
        runs = {t, *(carried[t + 1] - carried[t] - into[t]), *(out[t] - carried[t])}
        for i in reversed(range(t + 1)):
            if i in runs:
                runs.update(d for d in dag.deps[i] if d not in carried[t])
        found.append(SwapStage(carried=carried[t], runs=tuple(sorted(runs)), out=out[t], into=into[t]))
    return tuple(found)


def replayed(dag: Dag, stages: Sequence[SwapStage], link: LinkRates) -> tuple[int, float]:
    """(peak in bytes, seconds) of these stages, walked one run after the other. `InvalidInput` if they are not legal."""
    peak, seconds = 0, 0.0
    host: set[int] = set()
    live: set[int] = set()
    ran: list[int] = []
    for t, stage in enumerate(stages):
        after = stages[t + 1].carried if t + 1 < len(stages) else dag.keep
        if not stage.carried <= live or not stage.into <= host:
            raise InvalidInput(f"stage {t} begins with outputs that are not there", hint="plan again: holdall.plan(trace, ...)")
        live = set(stage.carried)
        arriving = sum(dag.size[i] for i in stage.into)
        for place, i in enumerate(stage.runs):
            if not live.issuperset(dag.deps[i]):
                raise InvalidInput(f"stage {t} lacks an input of node {i}", hint="plan again: holdall.plan(trace, ...)")
            needed = {d for later in stage.runs[place:] for d in dag.deps[later]} | set(stage.runs[place:])
            live = {j for j in live if j in needed or j in stage.out or (j in after and j not in stage.into)} | {i}
            peak = max(peak, sum(dag.size[j] for j in live) + arriving + dag.extra[i])
        if not stage.out <= live:
            raise InvalidInput(f"stage {t} copies outputs that are not there", hint="plan again: holdall.plan(trace, ...)")
        ran += stage.runs
        out, into = (sum(dag.size[i] for i in moved) for moved in (stage.out, stage.into))
        seconds += link.seconds(sum(dag.cost[i] for i in stage.runs), out, into)
        host |= stage.out
        live |= stage.into
    if not dag.keep <= live or {*ran} != {*range(len(dag))}:
        raise InvalidInput("the stages leave out nodes or outputs", hint="plan again: holdall.plan(trace, ...)")
    return peak, seconds
