"""Balanced cuts of a sequence of costs: torchgpipe's block partition, and the exact smallest largest part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from holdall.errors import InvalidInput


def block_partition(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Bounds of parts whose sums differ by no more than the largest cost (Barany and Grinberg, as torchgpipe balances).

    Take a largest part p. While some part is smaller by more than the largest cost, let q be the smallest, nearest to p: its
    neighbour on the side of p gives it one layer. When p itself has given one, begin again with a largest part.
    """
    _check(costs, parts)
    step = max(costs) or 1.0
    sums = [0.0, *accumulate(costs)]
    bounds = [round(i * len(costs) / parts) for i in range(parts + 1)]

    def size(part: int) -> float:
        return sums[bounds[part + 1]] - sums[bounds[part]]

    while True:
        largest = max(range(parts), key=size)
        while True:
            least = min(map(size, range(parts)))
            if size(largest) - least <= step * (1 + 1e-12):
                return tuple(bounds)
            smallest = min((q for q in range(parts) if size(q) == least), key=lambda q: abs(q - largest))
            if largest < smallest:
                giver = smallest - 1
                bounds[smallest] -= 1
            else:
                giver = smallest + 1
                bounds[giver] += 1
            if giver == largest:
                break


def even_cut(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Bounds of parts, none empty, whose largest sum is the smallest possible; exact, by dynamic programming."""
    _check(costs, parts)
    sums = [0.0, *accumulate(costs)]
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))] + [(float("inf"), ())] * len(costs)
    for part in range(parts):
        following: list[tuple[float, tuple[int, ...]]] = [(float("inf"), ())] * (len(costs) + 1)
        for end in range(part + 1, len(costs) - (parts - part - 1) + 1):
            following[end] = min((max(best[k][0], sums[end] - sums[k]), (*best[k][1], end)) for k in range(part, end))
        best = following
    return best[len(costs)][1]


def _check(costs: Sequence[float], parts: int) -> None:
    if not 1 <= parts <= len(costs) or min(costs) < 0:
        raise InvalidInput(
            f"{len(costs)} layers do not make {parts} stages",
            hint="use as many layers as stages, or more; costs are not negative",
        )
