"""Which results of a block to keep if the rest is recomputed once: every Pareto-optimal trade of bytes against seconds.

For a price per byte the best set is a minimum cut. Every forward node has two switches: its result is *there* in backward, and
it was *made again*. There but not made again means kept, which costs bytes times price; made again costs its seconds and
requires its inputs to be there. Varying the price gives the sets on the lower convex hull of (bytes, seconds).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from holdall.actions.reschedule.dag import Dag

_NEVER = float("inf")


def best_sets(dag: Dag, middle: int, *, keepable: Collection[int] | None = None, most: int = 12) -> list[frozenset[int]]:
    """Sets of forward nodes (below `middle`) to keep, from the smallest to the largest. `keepable`: only these may be kept."""
    can = set(range(middle)) if keepable is None else set(keepable)
    needed = _needed(dag, middle)
    nothing = _cut(dag, middle, needed, can, 1e30)
    everything = _cut(dag, middle, needed, can, 0.0)
    found = {nothing, everything}
    pending = deque([(nothing, everything)])
    while pending and len(found) < most:
        small, large = pending.popleft()
        saved = _bytes(dag, large) - _bytes(dag, small)
        faster = _seconds(dag, middle, needed, small) - _seconds(dag, middle, needed, large)
        if saved <= 0 or faster <= 0:
            continue
        between = _cut(dag, middle, needed, can, faster / saved)
        if between not in found:
            found.add(between)
            pending += [(small, between), (between, large)]
    return sorted(found, key=lambda s: (_bytes(dag, s), sorted(s)))


def telling(dag: Dag, middle: int, sets: Sequence[frozenset[int]], most: int) -> list[frozenset[int]]:
    """`most` of the sets, in their order. Removes one set after the other: the one whose removal loses the least area under the
    curve of seconds over bytes."""
    needed = _needed(dag, middle)
    left = [(_bytes(dag, s), _seconds(dag, middle, needed, s), s) for s in sets]
    while len(left) > max(2, most):
        lost = [
            abs((b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1]))
            for a, b, c in zip(left, left[1:], left[2:], strict=False)
        ]
        del left[1 + lost.index(min(lost))]
    return [s for _, _, s in left]


def made_again(dag: Dag, needed: Collection[int], kept: Collection[int]) -> set[int]:
    """The forward nodes to recompute if these results are kept."""
    again: set[int] = set()
    waiting = [i for i in needed if i not in kept]
    while waiting:
        i = waiting.pop()
        if i not in again:
            again.add(i)
            waiting += [d for d in dag.deps[i] if d not in kept]
    return again


def _needed(dag: Dag, middle: int) -> set[int]:
    """The forward nodes whose results backward reads."""
    return {d for i in range(middle + 1, len(dag)) for d in dag.deps[i] if d < middle}


def _bytes(dag: Dag, kept: Collection[int]) -> int:
    return sum(dag.size[i] for i in kept)


def _seconds(dag: Dag, middle: int, needed: Collection[int], kept: Collection[int]) -> float:  # noqa: ARG001
    return sum(dag.cost[i] for i in made_again(dag, needed, kept))


def _cut(dag: Dag, middle: int, needed: Collection[int], can: Collection[int], price: float) -> frozenset[int]:
    """The set that is kept in the cheapest cut at this price per byte."""
    source, sink = 2 * middle, 2 * middle + 1
    flow = _Flow(2 * middle + 2)
    for i in range(middle):
        there, again = i, middle + i
        flow.edge(there, again, dag.size[i] * price if i in can else _NEVER)
        flow.edge(again, sink, dag.cost[i] + 1e-12)  # of equal sets choose the one with fewer runs
        if i in needed:
            flow.edge(source, there, _NEVER)
        for d in dag.deps[i]:
            flow.edge(again, d, _NEVER)
    side = flow.source_side(source, sink)
    return frozenset(i for i in range(middle) if i in side and middle + i not in side and dag.size[i])


class _Flow:
    """Maximum flow by shortest augmenting paths; graphs here have a hundred nodes."""

    def __init__(self, nodes: int) -> None:
        self.room: list[dict[int, float]] = [{} for _ in range(nodes)]

    def edge(self, a: int, b: int, capacity: float) -> None:
        self.room[a][b] = self.room[a].get(b, 0.0) + capacity
        self.room[b].setdefault(a, 0.0)

    def source_side(self, source: int, sink: int) -> set[int]:
        """Send the maximum flow, then return the nodes that are still reachable."""
        while True:
            came = self._search(source, sink)
            if sink not in came:
                return set(came)
            path = [sink]
            while path[-1] != source:
                path.append(came[path[-1]])
            edges = list(zip(path[1:], path[:-1], strict=True))
            amount = min(self.room[a][b] for a, b in edges)
            for a, b in edges:
                self.room[a][b] -= amount
                self.room[b][a] += amount

    def _search(self, source: int, sink: int) -> dict[int, int]:
        came = {source: source}
        queue = deque([source])
        while queue and sink not in came:
            a = queue.popleft()
            for b, room in self.room[a].items():
                if b not in came and room > 1e-18:
                    came[b] = a
                    queue.append(b)
        return came
