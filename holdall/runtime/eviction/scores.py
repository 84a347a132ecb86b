"""Scores of storages: the pool evicts the lowest.

After "Dynamic Tensor Rematerialization" (Kirisame et al., ICLR 2021, arXiv 2006.09616): recomputation cost over bytes and
staleness. The factors can be combined freely, as in the paper's ablation; the named combinations are its heuristics.
`megtaichi` follows MegTaiChi (ICS 2022, doi 10.1145/3524059.3532394): free neighbours in the arena count as bytes, and storages
that were recomputed often are spared. `delta` follows DELTA (arXiv 2203.15980): the cheaper of recomputation and swap counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from holdall.errors import unknown_name
from holdall.runtime.eviction.storages import Storage
from holdall.units import MiB

if TYPE_CHECKING:
    from holdall.runtime.eviction.pool import EvictionPool

Score = Callable[["EvictionPool", Storage], float]

# recomputation cost, including the evicted neighbourhood


class Component:
    """A union-find node of connected evicted storages; the sum is kept at the root.

    Components are never split: a recomputed storage only subtracts its own cost, so sums are approximate, as in the paper.
    """

    __slots__ = ("parent", "rank", "sum")

    def __init__(self, value: float) -> None:
        self.parent: Component | None = None
        self.rank = 0
        self.sum = value

    def find(self) -> Component:
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent
            node = node.parent
        return node


def join(first: Component, second: Component) -> Component:
    a, b = first.find(), second.find()
    if a is b:
        return a
    if a.rank < b.rank:
        a, b = b, a
    b.parent = a
    a.rank += a.rank == b.rank
    a.sum += b.sum
    return a


def neighbours(s: Storage) -> Iterable[Storage]:
    """Evicted direct inputs and results of a storage."""
    yield from (p for p in s.parents if not p.is_there and not p.pinned and not p.is_away)
    yield from (c for c in s.children if not c.is_there and not c.is_away)


def reach(s: Storage, *, up: bool) -> tuple[list[Storage], list[Storage]]:
    """(evicted storages reachable through evicted ones in one direction, storages on the device at the border)."""
    inside: dict[Storage, None] = {}
    border: dict[Storage, None] = {}
    todo = [s]
    while todo:
        at = todo.pop()
        for x in at.parents if up else at.children:
            if x.is_there or x.pinned or x.is_away:
                border[x] = None
            elif x not in inside:
                inside[x] = None
                todo.append(x)
    return list(inside), list(border)


def spread(s: Storage) -> tuple[float, float]:
    """Cost of the evicted ancestors and of the evicted descendants; cached until one of them changes."""
    if s.spread is None:
        s.spread = (sum(x.cost for x in reach(s, up=True)[0]), sum(x.cost for x in reach(s, up=False)[0]))
    return s.spread


def whole_neighbourhood(s: Storage) -> float:
    """e*: all connected evicted ancestors and descendants."""
    return s.cost + sum(spread(s))


def component_neighbourhood(s: Storage) -> float:
    """The union-find components of its direct neighbours, each once."""
    roots = {id(root): root for root in (x.root.find() for x in neighbours(s) if x.root is not None)}
    total: float = s.cost + sum(root.sum for root in roots.values())
    return total


def ancestors(s: Storage) -> float:
    return s.cost + spread(s)[0]


def own(s: Storage) -> float:
    return s.cost


def nothing(s: Storage) -> float:  # noqa: ARG001
    return 1.0


COSTS: dict[str, Callable[[Storage], float]] = {
    "e*": whole_neighbourhood,
    "eq": component_neighbourhood,
    "ancestors": ancestors,
    "local": own,
    "none": nothing,
}


@dataclass(frozen=True, kw_only=True)
class ScoreParts:
    """One combination of the ablation: a cost, over bytes, over staleness."""

    cost: str
    size: bool
    staleness: bool

    @property
    def needs(self) -> frozenset[str]:
        """What the pool must keep up to date for this score."""
        return frozenset({"e*": {"spreads"}, "ancestors": {"spreads"}, "eq": {"components"}}.get(self.cost, ()))

    def __call__(self, pool: EvictionPool, s: Storage) -> float:
        below = (s.size if self.size else 1) * (pool.clock - s.last if self.staleness else 1)
        cost = COSTS[self.cost](s)
        return cost / below if below > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Random:
    """A random score, determined by seed and storage."""

    seed: int = 0
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, pool: EvictionPool, s: Storage) -> float:
        return random.Random(hash((self.seed, pool.evictions, s.born))).random()


@dataclass(frozen=True, kw_only=True)
class MegTaiChi:
    """`credit`: weight of free neighbours; `base`: growth per earlier recomputation; `tiny`: added against division by zero, in
    units of the clock.
    """

    credit: float = 1.0
    base: float = 1.0001
    tiny: float = 1e-3
    needs: ClassVar[frozenset[str]] = frozenset({"components"})

    def __call__(self, pool: EvictionPool, s: Storage) -> float:
        free = pool.arena.free_beside(s.place) if pool.arena is not None and s.place is not None else 0
        weight = (s.size + self.credit * free) / MiB
        below = weight * (pool.clock - s.last + self.tiny)
        return (component_neighbourhood(s) + self.tiny) * self.base**s.times / below if below > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class CoopScore:
    """The cost of one storage in a window; always finite, because windows are sums."""

    tiny: float = 1e-9
    needs: ClassVar[frozenset[str]] = frozenset({"components"})

    def __call__(self, pool: EvictionPool, s: Storage) -> float:
        return component_neighbourhood(s) / max(pool.clock - s.last, self.tiny)


@dataclass(frozen=True, kw_only=True)
class DeltaScore:
    """DELTA's filter: the cost of bringing the storage back in the cheaper way, over bytes and the time that it is not used."""

    needs: ClassVar[frozenset[str]] = frozenset({"components"})

    def __call__(self, pool: EvictionPool, s: Storage) -> float:
        below = s.size * pool.swaps.unused(pool, s)
        return pool.swaps.penalty(pool, s) / below if below > 0 else math.inf


NAMED: dict[str, Score] = {
    "dtr": ScoreParts(cost="e*", size=True, staleness=True),
    "dtr_eq": ScoreParts(cost="eq", size=True, staleness=True),
    "local": ScoreParts(cost="local", size=True, staleness=True),
    "lru": ScoreParts(cost="none", size=False, staleness=True),
    "size": ScoreParts(cost="none", size=True, staleness=False),
    "msps": ScoreParts(cost="ancestors", size=True, staleness=False),
    "random": Random(),
    "megtaichi": MegTaiChi(),
    "coop": CoopScore(),
    "delta": DeltaScore(),
}
"""Scores by name. `coop` is the cost of one storage in a window: bytes are already the constraint there."""

GRID = tuple(
    ScoreParts(cost=cost, size=size, staleness=staleness)
    for cost in ("e*", "eq", "local", "none")
    for size in (True, False)
    for staleness in (True, False)
)


def score_named(name: str) -> Score:
    if name not in NAMED:
        raise unknown_name("score", name, NAMED)
    return NAMED[name]
