"""ProTrain's chunks: parameters in the order of their first use, packed into pieces of one size, and the search of that size.

The paper tries a few sizes and takes the one whose chunks leave least room over; the last chunk is not counted. The parameters
of a unit lie together: a unit that does not fit beside those before it begins a chunk, and goes on in others if it is larger
than one.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdall.units import MiB

GRID = (32 * MiB, 64 * MiB, 128 * MiB, 256 * MiB)


def pack_units(units: Sequence[Sequence[int]], size: int) -> list[list[tuple[int, int]]]:
    """(unit, bytes) of the parameters of every chunk. One that is larger than a chunk has one of its own."""
    chunks: list[list[tuple[int, int]]] = []
    room = 0
    for n, params in enumerate(units):
        if sum(params) > room:
            room = 0
        for nbytes in params:
            if not chunks or nbytes > room:
                chunks.append([])
                room = max(size, nbytes)
            chunks[-1].append((n, nbytes))
            room -= nbytes
    return chunks


def slack(units: Sequence[Sequence[int]], size: int) -> int:
    """Bytes that all chunks but the last leave over."""
    used = [sum(nbytes for _, nbytes in chunk) for chunk in pack_units(units, size)]
    return sum(max(0, size - taken) for taken in used[:-1])


def chunk_size(units: Sequence[Sequence[int]], grid: Sequence[int] = GRID) -> int:
    """The size of the grid with the least slack, the smaller of equals.

    A size must hold every parameter, those apart that no size holds. One that holds the whole model in one chunk has no slack
    and leaves nothing to decide: it is taken only where all do.
    """
    most = max((nbytes for params in units for nbytes in params if nbytes <= max(grid)), default=0)
    fitting = [size for size in sorted(grid) if size >= most]
    dividing = [size for size in fitting if len(pack_units(units, size)) > 1]
    return min(dividing or fitting, key=lambda size: slack(units, size))


def boundaries(units: Sequence[Sequence[int]], size: int) -> tuple[int, ...]:
    """Numbers of units after which no chunk goes on; size 0: after every unit."""
    if not size:
        return tuple(range(len(units) + 1))
    inside = {n for chunk in pack_units(units, size) for n in range(chunk[0][0] + 1, chunk[-1][0] + 1)}
    return tuple(n for n in range(len(units) + 1) if n not in inside)
