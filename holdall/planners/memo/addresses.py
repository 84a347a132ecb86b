"""Static addresses for tensors with known lifetimes, in two levels, as Memo plans them.

Tensors that are alive at the same time must not overlap. The mixed-integer program gives tensor i an address A_i, and every
such pair an order z_ij: A_i + S_i <= A_j if z_ij, else A_j + S_j <= A_i; it minimises the peak. Level one solves each layer
alone, once for equal layers. Level two replaces a layer by one block of memory of its peak, and solves the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdall.planning import highs

_MOST = 40  # tensors that the program is solved for; best fit beyond


class Life(NamedTuple):
    """A tensor: its bytes, and the first and the last step at which it is there."""

    nbytes: int
    first: int
    last: int

    def meets(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


class AddressPlan(NamedTuple):
    addresses: tuple[int, ...]
    peak: int
    bound: int  # no placement has a lower peak


def live_bytes(lives: Sequence[Life]) -> int:
    """The most bytes that are alive at once."""
    return max((sum(x.nbytes for x in lives if x.first <= at.first <= x.last) for at in lives), default=0)


def best_fit(lives: Sequence[Life]) -> AddressPlan:
    """Largest tensors first, each in the smallest gap between those placed before that are alive with it."""
    found: dict[int, int] = {}
    for n in sorted(range(len(lives)), key=lambda n: (-lives[n].nbytes, n)):
        taken = sorted((found[m], found[m] + lives[m].nbytes) for m in found if lives[m].meets(lives[n]))
        gaps, end = [], 0
        for begin, until in taken:
            if begin - end >= lives[n].nbytes:
                gaps.append((begin - end, end))
            end = max(end, until)
        found[n] = min(gaps)[1] if gaps else end
    peak = max((found[n] + lives[n].nbytes for n in found), default=0)
    return AddressPlan(tuple(found[n] for n in range(len(lives))), peak, live_bytes(lives))


def solve(lives: Sequence[Life], *, time_limit: float = 5.0) -> AddressPlan:
    """The placement of the lowest peak; best fit where that is optimal, or where there are too many tensors."""
    start = best_fit(lives)
    if start.peak == start.bound or len(lives) > _MOST:
        return start
    pairs = [(i, j) for i in range(len(lives)) for j in range(i) if lives[i].meets(lives[j])]
    size = np.array([x.nbytes for x in lives], float) / start.peak  # in peaks of best fit: small numbers
    model = highs.Model()
    peak = model.add_columns(1, cost=1.0, lower=start.bound / start.peak, upper=1.0)
    at = model.add_columns(len(lives), upper=1.0 - size)
    order = model.add_columns(len(pairs), whole=True)
    below, above = at[[i for i, _ in pairs]], at[[j for _, j in pairs]]
    lower_size, upper_size = size[[i for i, _ in pairs]], size[[j for _, j in pairs]]
    model.add_rows([(below, 1.0), (above, -1.0), (order, 1.0)], upper=1.0 - lower_size)
    model.add_rows([(above, 1.0), (below, -1.0), (order, -1.0)], upper=-upper_size)
    model.add_rows([(at, 1.0), (np.repeat(peak, len(lives)), -1.0)], upper=-size)
    found = highs.solve(model, time_limit=time_limit)
    if found.x is None:
        return start
    packed = _packed(lives, np.argsort(found.x[at], kind="stable").tolist())
    bound = max(start.bound, int(np.floor(found.bound * start.peak + 1e-6)))
    best = min(packed, start, key=lambda p: p.peak)
    return AddressPlan(best.addresses, best.peak, min(bound, best.peak))


def _packed(lives: Sequence[Life], order: Sequence[int]) -> AddressPlan:
    """Every tensor as low as those before it in the order permit: exact bytes from the program's rounded addresses."""
    found: dict[int, int] = {}
    for n in order:
        found[n] = max((found[m] + lives[m].nbytes for m in found if lives[m].meets(lives[n])), default=0)
    peak = max((found[n] + lives[n].nbytes for n in found), default=0)
    return AddressPlan(tuple(found[n] for n in range(len(lives))), peak, live_bytes(lives))


def in_two_levels(layers: Sequence[Sequence[Life]], rest: Sequence[Life], *, time_limit: float = 5.0) -> AddressPlan:
    """Each layer alone, then the step with a layer as one block of memory. The addresses are those of `rest`, of the first
    layer's tensors, of the second's, and so on."""
    solved: dict[tuple[Life, ...], AddressPlan] = {}
    inner = []
    for lives in layers:
        begin = min((x.first for x in lives), default=0)
        key = tuple(Life(x.nbytes, x.first - begin, x.last - begin) for x in lives)
        if key not in solved:
            solved[key] = solve(key, time_limit=time_limit)
        inner.append(solved[key])
    blocks = [
        Life(placed.peak, min(x.first for x in lives), max(x.last for x in lives))
        for lives, placed in zip(layers, inner, strict=True)
        if lives
    ]
    outer = solve([*rest, *blocks], time_limit=time_limit)
    bases = iter(outer.addresses[len(rest) :])
    addresses = list(outer.addresses[: len(rest)])
    for lives, placed in zip(layers, inner, strict=True):
        base = next(bases) if lives else 0
        addresses += [base + address for address in placed.addresses]
    every = [*rest, *(x for lives in layers for x in lives)]
    return AddressPlan(tuple(addresses), outer.peak, live_bytes(every))
