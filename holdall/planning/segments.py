"""Consecutive blocks that can be replayed as one segment, and ways to cut them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holdall.actions.recompute import Recompute, obstacle
from holdall.types import Action, Block, Problem, Trace


def runs(trace: Trace) -> list[list[Block]]:
    """Maximal rows of adjacent blocks that can all be recomputed."""
    found: list[list[Block]] = []
    for block in trace.blocks:
        if block.backward is None or not block.saves or obstacle(trace, [block]):
            continue
        last = found[-1][-1] if found else None
        if last is not None and last.id + 1 == block.id and last.last + 1 == block.first:
            found[-1].append(block)
        else:
            found.append([block])
    return found


def saving(trace: Trace) -> list[Block]:
    """Blocks that save tensors for backward, in forward order."""
    return [b for b in trace.blocks if b.saves and b.backward is not None]


def cut(blocks: Sequence[Block], size: int) -> list[list[Block]]:
    """Segments of `size` blocks; the last may be shorter."""
    return [list(blocks[i : i + size]) for i in range(0, len(blocks), size)]


def segmented(problem: Problem) -> Iterator[tuple[int, list[Action]]]:
    """Every row of blocks cut into segments of a few lengths around the square root of the row's."""
    rows = runs(problem.trace)
    longest = max((len(row) for row in rows), default=0)
    root = math.isqrt(longest)
    for size in sorted({s for s in (2, 3, root - 1, root, root + 2) if 2 <= s <= longest}):
        yield size, [Recompute.of(problem.trace, segment) for row in rows for segment in cut(row, size)]
