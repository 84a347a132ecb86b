"""Problems with known answers, answers that were kept, and solvers that look at every possibility: exact, slow, for small
cases only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count, permutations
from math import inf, isclose
from random import Random
from typing import Any

from holdall.actions.reschedule.dag import Answer, Dag, Program, answer
from holdall.planning.chunk_tracer import TracedStates, UseMoment
from holdall.runtime.eviction.replay import Free, Key, OpCall
from holdall.types import Unit
from holdall.types.lifetimes import Lifetime, StepLifetimes, lifetimes_of
from holdall.types.trace import Bytes


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


# lifetimes and their layouts


def random_lifetimes(rng: Random, count: int, *, period: int = 16, most: int = 12, wraps: bool = False) -> StepLifetimes:
    """Any lifetimes and sizes; `wraps`: some are alive from one step to the next."""
    found = []
    for key in range(count):
        begin = rng.randrange(period)
        end = rng.randint(begin + 1, period)
        if wraps and begin and rng.random() < 0.3:
            end = rng.randint(1, begin)
        found.append(Lifetime(key, begin, end, rng.randint(1, most)))
    return StepLifetimes(tuple(sorted(found, key=lambda t: t.begin)), period)


def training_lifetimes(rng: Random, layers: int, *, recompute: bool = False, unit: Bytes = 512) -> StepLifetimes:
    """A synthetic step: activations wait for their backward, with temporaries both ways. `recompute`: every second layer
    keeps its first tensor alone, and makes the others again."""
    order: list[tuple[int, Bytes]] = []
    held: list[tuple[int, list[int]]] = []  # layer -> what it keeps
    sizes = [[rng.choice((1, 2, 4, 8, 16)) * rng.randint(3, 9) * unit for _ in range(3)] for _ in range(layers)]
    key = 0

    def alloc(size: Bytes) -> int:
        nonlocal key
        key += 1
        order.append((key, size))
        return key

    def passage(layer: int) -> list[int]:
        made = []
        for size in sizes[layer]:
            temporary = alloc(rng.choice((1, 2, 4)) * size)
            made.append(alloc(size))
            order.append((temporary, -1))
        return made

    for layer in range(layers):
        made = passage(layer)
        if recompute and layer % 2:
            order.extend((x, -1) for x in made[1:])
            made = made[:1]
        held.append((layer, made))
    gradient = alloc(sizes[-1][0])
    for layer, made in reversed(held):
        again = passage(layer)[1:] if recompute and layer % 2 else []
        for x in (*reversed(again), *reversed(made)):
            temporary, new = alloc(rng.choice((1, 2)) * sizes[layer][0]), alloc(sizes[layer][0])
            order.extend(((temporary, -1), (gradient, -1), (x, -1)))
            gradient = new
    order.append((gradient, -1))
    return lifetimes_of(order, align=unit)


def brute_force_height(lifetimes: StepLifetimes) -> Bytes:
    """The least height: the lowest of all orders in which tensors are put at the lowest free offset."""
    numbers = range(len(lifetimes.tensors))
    spans = [t.spans(lifetimes.period) for t in lifetimes.tensors]
    meet = [[any(b < e and c < d for b, d in spans[i] for c, e in spans[j]) for j in numbers] for i in numbers]
    best = sum(t.size for t in lifetimes.tensors)
    for order in permutations(numbers):
        placed: dict[int, Bytes] = {}
        for number in order:
            offset = 0
            for low, top in sorted((o, o + lifetimes.tensors[n].size) for n, o in placed.items() if meet[n][number]):
                if low - offset >= lifetimes.tensors[number].size:
                    break
                offset = max(offset, top)
            placed[number] = offset
            if offset + lifetimes.tensors[number].size >= best:
                break
        else:
            best = max((o + lifetimes.tensors[n].size for n, o in placed.items()), default=0)
        if best == lifetimes.load:
            break
    return best


# planners that move chunks


def step_of_units(sizes: list[int], others: list[int] | int = 0, *, width: int = 2, state_width: float = 12) -> TracedStates:
    """A forward over units of one parameter each and a backward in reverse. `others`: bytes by moment, or always."""
    units = tuple(
        Unit(id=n, name=f"u{n}", params=(f"u{n}.w",), weights=(n,), grads=(), states=(), numel=size, moved=0, workspace=0)
        for n, size in enumerate(sizes)
    )
    order = [*range(len(sizes)), *reversed(range(len(sizes)))]
    free = others if isinstance(others, list) else [others] * len(order)
    return TracedStates(
        units=units,
        fixed=frozenset(),
        moments=tuple(UseMoment(unit=u, is_backward=n >= len(sizes), others=free[n]) for n, u in enumerate(order)),
        params=tuple(enumerate(sizes)),
        width=width,
        state_width=state_width,
    )


def fewest_loads(accesses: list[int], blocks: int) -> int:
    """Over all ways to evict."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chunk in accesses:
        after: dict[frozenset[int], int] = {}
        for here, loads in states.items():
            if chunk in here:
                choices = [(here, loads)]
            elif len(here) < blocks:
                choices = [(here | {chunk}, loads + 1)]
            else:
                choices = [(here - {out} | {chunk}, loads + 1) for out in here]
            for key, cost in choices:
                after[key] = min(cost, after.get(key, cost))
        states = after
    return min(states.values())


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """What differs between kept answers (from a JSON file) and those of now, a line each; floats to a millionth."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(k for k in after if k not in before)]
        return [line for k in keys for line in differences(before.get(k), after.get(k), f"{where} {k}".strip())]
    if isinstance(before, float) and isinstance(after, float) and isclose(before, after, rel_tol=1e-6, abs_tol=1e-12):
        return []
    return [] if before == after else [f"{where}: {before} was kept, {after} it is now"]
