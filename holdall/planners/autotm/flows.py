"""AutoTM's integer program: one flow through a small network decides where a tensor is between its uses.

Nodes of the step run one after the other. A tensor passes a gadget at each of its users and, if moves may overlap
computation, at nodes near its users. Between gadgets it is in one of three states: PRE (on the device, never copied), FAST (on
the device, with a copy in the slow memory) or SLOW. The edges of a gadget lead from state to state:

    at a user          PRE -> PRE, FAST -> FAST    it stays
                       PRE -> SLOW                 written after the node: the node's time, then the copy's
                       SLOW -> FAST, SLOW -> SLOW  read before the node
                       FAST -> SLOW                dropped: there is a copy
    elsewhere          PRE -> SLOW, SLOW -> FAST   written or read beside the node
                       all states                  stay; FAST -> SLOW: dropped

Kernels need all their operands on the device, as in AutoTM's version for GPUs. A node takes the longer of its computation and
the copies beside it, which share one link; other copies add up. At every node, the tensors on the device fit its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from holdall.planning.highs import Model, solve

Mode = Literal["static", "synchronous", "asynchronous"]
MODES: tuple[Mode, ...] = ("static", "synchronous", "asynchronous")
RADIUS = 15  # nodes from a user at which a tensor may move beside the computation
_EPSILON = 1e-6  # of all seconds: what all moves together cost besides their time, so that none is made in vain
_PRE, _FAST, _SLOW = "pre", "fast", "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A tensor: its bytes and the nodes that use it, in order. The first makes it."""

    size: float
    users: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FlowStep:
    """What is to be decided. Seconds and limits by node; a limit is what movable tensors may take."""

    seconds: Sequence[float]
    limits: Sequence[float]
    tensors: Sequence[Movable]
    write: float  # bytes per second
    read: float
    room: float = inf  # bytes of the slow memory, for all tensors that are ever written
    turn: int | None = None  # tensors are written before this node and read from it on; None: whenever

    def may_write(self, node: int) -> bool:
        return self.turn is None or node < self.turn

    def may_read(self, node: int) -> bool:
        return self.turn is None or node >= self.turn


class FlowMove(NamedTuple):
    tensor: int
    node: int
    way: Literal["write", "read"]
    beside: bool  # the node's computation; else after it (write) or before it (read)


@dataclass(frozen=True, kw_only=True)
class FlowAnswer:
    """`seconds`: of the step; infinite if nothing fits."""

    seconds: float
    moves: tuple[FlowMove, ...] = field(default=())


class _Edge(NamedTuple):
    source: str
    target: str
    way: Literal["write", "read", ""]  # "": no copy
    on_device: bool  # while the node runs


_AT_USER = (
    _Edge(_PRE, _PRE, "", True),
    _Edge(_PRE, _SLOW, "write", True),
    _Edge(_FAST, _FAST, "", True),
    _Edge(_FAST, _SLOW, "", True),
    _Edge(_SLOW, _FAST, "read", True),
    _Edge(_SLOW, _SLOW, "read", True),
)
_ELSEWHERE = (
    _Edge(_PRE, _PRE, "", True),
    _Edge(_PRE, _SLOW, "write", True),
    _Edge(_FAST, _FAST, "", True),
    _Edge(_FAST, _SLOW, "", False),
    _Edge(_SLOW, _FAST, "read", True),
    _Edge(_SLOW, _SLOW, "", False),
)


def gadgets(tensor: Movable, mode: Mode, radius: int = RADIUS) -> list[int]:
    """The nodes at which a tensor may move."""
    first, last = tensor.users[0], tensor.users[-1]
    near = range(first + 1, last) if mode == "asynchronous" else ()
    return sorted({*tensor.users, *(k for k in near if min(abs(k - u) for u in tensor.users) <= radius)})


def optimum(step: FlowStep, mode: Mode, *, radius: int = RADIUS, time_limit: float = 30.0) -> FlowAnswer:
    """The best locations, or those found within the time limit."""
    program = _Program(step)
    for number, tensor in enumerate(step.tensors):
        program.add(number, tensor, gadgets(tensor, mode, radius), moves=mode != "static")
    return program.solve(time_limit)


class _Program:
    """Columns: one for each edge, and the seconds of each node. Bytes and seconds are scaled to about one."""

    def __init__(self, step: FlowStep) -> None:
        self.step = step
        self.model = Model()
        self._total = sum(step.seconds) or 1.0
        self._bytes = max((t.size for t in step.tensors), default=1.0) or 1.0
        self._all = sum(t.size for t in step.tensors) or 1.0
        self._nodes = self.model.add_columns(
            len(step.seconds), cost=1.0, lower=np.asarray(step.seconds) / self._total, upper=inf
        )
        self._there: dict[int, list[tuple[int, float]]] = {}  # node -> (column, bytes) of tensors on the device
        self._beside: dict[int, list[tuple[int, float]]] = {}  # node -> (column, seconds) of copies beside it
        self._written: list[tuple[int, float]] = []
        self._moves: dict[int, FlowMove] = {}  # column -> the move that it is

    def add(self, number: int, tensor: Movable, at: Sequence[int], *, moves: bool) -> None:
        before: Mapping[str, Sequence[int]] = {}
        for place, node in enumerate(at):
            columns = [
                (edge, self._column(number, tensor, node, edge))
                for edge in (_AT_USER if node in tensor.users else _ELSEWHERE)
                if self._is_open(edge, node, is_first=place == 0, moves=moves)
            ]
            if place == 0:
                self._row([(c, 1.0) for _, c in columns], lower=1.0, upper=1.0)
            else:
                for state in (_PRE, _FAST, _SLOW):
                    into = [(c, -1.0) for c in before.get(state, ())]
                    self._row(into + [(c, 1.0) for e, c in columns if e.source == state], lower=0.0, upper=0.0)
            before = {s: [c for e, c in columns if e.target == s] for s in (_PRE, _FAST, _SLOW)}
            after = at[place + 1] if place + 1 < len(at) else node + 1
            for between in range(node + 1, after):  # nodes without a gadget
                self._there.setdefault(between, []).extend((c, tensor.size) for s in (_PRE, _FAST) for c in before[s])

    def _is_open(self, edge: _Edge, node: int, *, is_first: bool, moves: bool) -> bool:
        if is_first and edge.source != _PRE:
            return False  # the node makes it
        if edge.way == "write" or edge.source != edge.target == _SLOW:
            return moves and self.step.may_write(node)
        return edge.way != "read" or (moves and self.step.may_read(node))

    def _column(self, number: int, tensor: Movable, node: int, edge: _Edge) -> int:
        rate = {"write": self.step.write, "read": self.step.read, "": inf}[edge.way]
        seconds = tensor.size / rate / self._total
        beside = node not in tensor.users
        cost = 0.0 if beside else seconds
        if edge.way:
            cost += _EPSILON * tensor.size / self._all
        (column,) = self.model.add_columns(1, cost=cost, whole=True).tolist()
        if edge.on_device:
            self._there.setdefault(node, []).append((column, tensor.size))
        if edge.way and beside:
            self._beside.setdefault(node, []).append((column, seconds))
        if edge.way == "write":
            self._written.append((column, tensor.size))
        if edge.way:
            self._moves[column] = FlowMove(number, node, edge.way, beside)
        return int(column)

    def _row(self, terms: Sequence[tuple[int, float]], *, lower: float = -inf, upper: float = inf) -> None:
        if terms:
            (row,) = self.model.add_rows([(np.array([terms[0][0]]), terms[0][1])], lower=lower, upper=upper)
            columns = np.array([c for c, _ in terms[1:]], dtype=np.int64)
            self.model.add_entries(np.full(len(columns), row), columns, np.array([v for _, v in terms[1:]]))

    def solve(self, time_limit: float) -> FlowAnswer:
        step = self.step
        if not step.tensors:
            return FlowAnswer(seconds=sum(step.seconds))
        for node, terms in self._there.items():
            self._row([(c, size / self._bytes) for c, size in terms], upper=step.limits[node] / self._bytes)
        for node, terms in self._beside.items():
            self._row([(int(self._nodes[node]), 1.0), *((c, -seconds) for c, seconds in terms)], lower=0.0)
        if step.room < inf:
            self._row([(c, size / self._bytes) for c, size in self._written], upper=step.room / self._bytes)
        found = solve(self.model, time_limit=time_limit)
        if found.x is None:
            return FlowAnswer(seconds=inf)
        taken = found.x
        moves = tuple(move for column, move in self._moves.items() if taken[column] > 0.5)
        return FlowAnswer(seconds=seconds_of(step, moves), moves=moves)


def seconds_of(step: FlowStep, moves: Sequence[FlowMove]) -> float:
    """The step with these moves: nodes and the copies beside them overlap, all other copies add up."""
    beside = [0.0] * len(step.seconds)
    alone = 0.0
    for move in moves:
        seconds = step.tensors[move.tensor].size / (step.write if move.way == "write" else step.read)
        if move.beside:
            beside[move.node] += seconds
        else:
            alone += seconds
    return alone + sum(map(max, step.seconds, beside))
