"""Small graphs of ops for the exact solvers of recomputation: the cost of a program.

A program lists the nodes in the order of their runs; a node may be listed several times. Frees are not listed: an output is
freed after its last use before it is made again. While a node runs, its output, all live outputs and its `extra` count.

`replay` is the naive reference that every solver's program has to pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

from holdall.errors import InvalidInput

Program = tuple[int, ...]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Dag:
    """Nodes 0..n-1 in the order of a plain run; a node may depend on smaller ones only."""

    cost: tuple[float, ...]
    size: tuple[int, ...]  # bytes of each output
    deps: tuple[tuple[int, ...], ...]
    extra: tuple[int, ...] = ()  # extra bytes while a node runs; empty: none
    fixed: frozenset[int] = frozenset()  # nodes that run exactly once: the loss, the backward
    keep: frozenset[int] = frozenset()  # outputs that are live at the end: gradients

    def __post_init__(self) -> None:
        n = len(self.cost)
        if not self.extra:
            object.__setattr__(self, "extra", (0,) * n)
        if not len(self.size) == len(self.deps) == len(self.extra) == n:
            raise InvalidInput(
                f"a graph of {n} costs has {len(self.size)} sizes, {len(self.deps)} deps, {len(self.extra)} extras"
            )
        for i, deps in enumerate(self.deps):
            if len(set(deps)) != len(deps) or not all(0 <= d < i for d in deps):
                raise InvalidInput(
                    f"node {i} depends on {deps}", hint="list each dependency once; nodes may depend on smaller numbers only"
                )
            if min(self.cost[i], self.size[i], self.extra[i]) < 0:
                raise InvalidInput(f"node {i} has a negative cost, size or extra")
        if not all(0 <= i < n for i in self.fixed | self.keep):
            raise InvalidInput(f"`fixed` and `keep` name nodes outside of 0..{n - 1}")

    def __len__(self) -> int:
        return len(self.cost)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The dependencies of each node as the bits of an int."""
        return tuple(sum(1 << d for d in deps) for deps in self.deps)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.deps]
        for i, deps in enumerate(self.deps):
            for d in deps:
                found[d].append(i)
        return tuple(tuple(u) for u in found)

    @cached_property
    def horizon(self) -> tuple[int, ...]:
        """The last node whose first run may need each output; len(self): it is kept."""
        last = list(range(len(self)))
        for i in reversed(range(len(self))):
            if i in self.keep:
                last[i] = len(self)
            for u in self.users[i]:
                last[i] = max(last[i], u if u in self.fixed else min(last[u], len(self) - 1))
        return tuple(last)

    @property
    def once(self) -> Program:
        """The plain program."""
        return tuple(range(len(self)))

    @property
    def floor(self) -> int:
        """A lower bound on the budget: the largest need of a single node, its inputs included."""
        alone = (self.size[i] + self.extra[i] + sum(self.size[d] for d in self.deps[i]) for i in range(len(self)))
        return max(*alone, sum(self.size[i] for i in self.keep), 0)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The effect of a program: bytes during each run, bytes after it and its frees, and the number of runs of each node."""

    peak: int
    seconds: float
    during: tuple[int, ...]
    after: tuple[int, ...]
    executed: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A solver's best program and its distance from the optimum."""

    program: Program | None  # None: none was found; `status` tells whether one exists
    cost: float  # of the program; infinite if there is none
    bound: float  # lower bound on the cost of any program in the solver's form
    gap: float  # (cost - bound) / cost
    status: Status
    seconds: float  # spent in solving


def answer(dag: Dag, program: Program | None, *, bound: float, status: Status, seconds: float) -> Answer:
    """The answer with the program's own cost. A bound that meets the cost within the solver's precision is set to it."""
    if program is None:
        return Answer(
            program=None, cost=inf, bound=bound, gap=0.0 if status == "infeasible" else inf, status=status, seconds=seconds
        )
    cost = replay(dag, program).seconds
    bound = min(bound, cost)
    gap = (cost - bound) / cost if cost else 0.0
    return Answer(program=program, cost=cost, bound=bound, gap=gap, status=status, seconds=seconds)


def uniform(layers: int) -> Dag:
    """U(L): L forward nodes in a row, then L backward nodes, each reading its layer's input and the gradient so far."""
    deps: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(layers)]
    for i in reversed(range(layers)):
        before = (i - 1,) if i else ()
        deps.append((*before, len(deps) - 1) if i < layers - 1 else before)
    return Dag(cost=(1.0,) * 2 * layers, size=(1,) * 2 * layers, deps=tuple(deps))


def replay(dag: Dag, program: Program) -> Replay:
    """Simulate the program. `InvalidInput` names the node of an illegal one and the input it lacks."""
    used: list[int | None] = [None] * len(dag)  # the last run so far that made or read each output
    frees = [0] * len(program)
    executed = [0] * len(dag)
    for place, node in enumerate(program):
        if not 0 <= node < len(dag):
            raise InvalidInput(f"the program runs node {node}; the graph has nodes 0..{len(dag) - 1}")
        for d in dag.deps[node]:
            if used[d] is None:
                raise InvalidInput(f"run {place} of the program, node {node}, needs node {d}, which was not run before")
            used[d] = place
        if (last := used[node]) is not None:  # the output of its run before was freed there
            frees[last] += dag.size[node]
        used[node] = place
        executed[node] += 1
    for node, last in enumerate(used):
        if last is None:
            raise InvalidInput(f"node {node} is never run")
        if executed[node] > 1 and node in dag.fixed:
            raise InvalidInput(f"node {node} is fixed to one run and is run {executed[node]} times")
        if node not in dag.keep:
            frees[last] += dag.size[node]
    held = 0
    during, after = [], []
    for node, freed in zip(program, frees, strict=True):
        held += dag.size[node]
        during.append(held + dag.extra[node])
        held -= freed
        after.append(held)
    seconds = float(sum(dag.cost[i] for i in program))
    peak = max(during, default=0)
    return Replay(peak=peak, seconds=seconds, during=tuple(during), after=tuple(after), executed=tuple(executed))


def fits(dag: Dag, program: Program, budget: int, *, loss: int | None = None, saved_budget: int | None = None) -> bool:
    """Does the program stay within the budget, and within `saved_budget` right after node `loss`?"""
    seen = replay(dag, program)
    saved = seen.after[program.index(loss)] if loss is not None and saved_budget is not None else 0
    return seen.peak <= budget and (saved_budget is None or saved <= saved_budget)
