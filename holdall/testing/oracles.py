"""Problems with known answers, and solvers that look at every possibility: exact, slow, for small cases only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from math import inf

from holdall.actions.reschedule.dag import Answer, Dag, Program, answer
from holdall.runtime.eviction.replay import Free, Key, OpCall


def shortest(dag: Dag, budget: int, *, loss: int | None = None, saved_budget: int | None = None) -> Answer:
    """The cheapest program whose first runs are in order, recomputation in any order: Dijkstra over (live set, next node).

    With `loss`, that node runs once and at most `saved_budget` is live right after it.
    """
    fixed = dag.fixed | ({loss} if loss is not None else frozenset())
    gate = len(dag) if loss is None or saved_budget is None else loss + 1  # a step of its own between loss and the next
    end = len(dag) + (gate < len(dag))
    keep = sum(1 << i for i in dag.keep)
    order = count()  # ties fall in the order of discovery
    start = (0, 0)
    best: dict[tuple[int, int], float] = {start: 0.0}
    came: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}  # -> (state before, node run or -1)
    queue = [(0.0, next(order), start, 0)]

    def reach(state: tuple[int, int], held: int, spent: float, before: tuple[int, int], ran: int) -> None:
        if spent < best.get(state, inf):
            best[state], came[state] = spent, (before, ran)
            heapq.heappush(queue, (spent, next(order), state, held))

    while queue:
        spent, _, state, held = heapq.heappop(queue)
        if spent > best[state]:
            continue
        live, step = state
        if step == end and live & keep == keep:
            return answer(dag, _path(came, state), bound=spent, status="optimal", seconds=0.0)
        at_gate = step == gate < len(dag)
        if at_gate and saved_budget is not None and held <= saved_budget:
            reach((live, step + 1), held, spent, state, -1)
        upcoming = step - (step > gate)  # the node whose first run is next
        for i in range(len(dag)):
            if live >> i & 1:
                reach((live & ~(1 << i), step), held - dag.size[i], spent, state, -1)
                continue
            may = not at_gate and (i == upcoming or (i < upcoming and i not in fixed)) and dag.reads[i] & ~live == 0
            if may and held + dag.size[i] + dag.extra[i] <= budget:
                after = (live | 1 << i, step + (i == upcoming))
                reach(after, held + dag.size[i], spent + dag.cost[i], state, i)
    return answer(dag, None, bound=inf, status="infeasible", seconds=0.0)


def uniform_chain(n: int) -> list[OpCall | Free]:
    """The experiment of DTR's simulator: n layers of cost and size 1, then their gradients, each freeing what it was the last
    to need."""
    program: list[OpCall | Free] = []
    for i in range(n):
        program.append(OpCall(reads=(("f", i - 1),) if i else (), writes=((("f", i), 1),), label="forward"))
    program.append(Free(key=("f", n - 1)))
    program.append(OpCall(writes=((("g", n - 1), 1),), label="gradient"))
    for i in range(n - 2, -1, -1):
        program.append(Free(key=("f", i)))
        reads: Sequence[Key] = [*([("f", i - 1)] if i else []), ("g", i + 1)]
        program.append(OpCall(reads=tuple(reads), writes=((("g", i), 1),), label="gradient"))
        program.append(Free(key=("g", i + 1)))
    return program


def _path(came: dict[tuple[int, int], tuple[tuple[int, int], int]], state: tuple[int, int]) -> Program:
    runs: list[int] = []
    while state in came:
        state, ran = came[state]
        if ran >= 0:
            runs.append(ran)
    return tuple(reversed(runs))
