"""Chen et al.: keep the inputs of segments, run each segment again when its backward begins.

"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. `sqrt`: about sqrt(n) segments of equal length; a fixed
rule that does not look at the budget. `greedy`: the paper's budgeted walk for unequal blocks, cutting whenever the bytes
since the last cut pass b, with b searched around sqrt(x * y). `all`: every block its own segment. The last segment is not
recomputed: its backward comes first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.recompute import Recompute
from holdall.errors import unknown_name
from holdall.planners._finish import finish
from holdall.planners._segments import cut, runs
from holdall.types import Block, Plan, Problem, Trace
from holdall.units import format_bytes

_GRID = 24  # values of b tried between b* / sqrt(2) and b* sqrt(2)


@dataclass(frozen=True, kw_only=True)
class Chen:
    variant: str = "sqrt"
    last: bool = False  # also recompute the last segment

    name: ClassVar[str] = "chen"
    paper: ClassVar[str] = "Chen et al. 2016, arXiv 1604.06174"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.variant not in _VARIANTS:
            raise unknown_name("variant of chen", self.variant, _VARIANTS)
        segments = []
        for row in runs(problem.trace):
            segments += _VARIANTS[self.variant](problem.trace, row)
        if segments and not self.last:
            segments.pop()
        actions = [Recompute.of(problem.trace, segment) for segment in segments]
        blocks = sum(len(s) for s in segments)
        why = [f"{self.variant}: {blocks} blocks in {len(segments)} segments are recomputed, their inputs kept"]
        if self.variant == "greedy":
            why.append(f"cut wherever more than {format_bytes(_largest(problem.trace, segments))} would be held")
        return finish(self, problem, actions, why=why, began=began)


def sqrt_segments(trace: Trace, row: Sequence[Block]) -> list[list[Block]]:  # noqa: ARG001
    return cut(row, math.ceil(len(row) / max(1, math.isqrt(len(row)))))


def all_segments(trace: Trace, row: Sequence[Block]) -> list[list[Block]]:  # noqa: ARG001
    return cut(row, 1)


def greedy_segments(trace: Trace, row: Sequence[Block]) -> list[list[Block]]:
    """The paper's Algorithm 3 with its search over b; the cut with the least kept + largest segment wins."""
    sizes = [held_bytes(trace, b) for b in row]
    inputs = [input_bytes(trace, b) for b in row]
    first = walk(sizes, inputs, math.isqrt(sum(sizes) * max(sizes)))
    x, y = cost(sizes, inputs, first)
    centre = math.sqrt(max(1, x) * max(1, y))
    tried = [first]
    for n in range(_GRID + 1):
        tried.append(walk(sizes, inputs, centre * math.sqrt(2) ** (2 * n / _GRID - 1)))
    count = max(1, math.isqrt(len(row)))
    tried.append(list(range(0, len(row), math.ceil(len(row) / count))))  # never worse than equal lengths
    best = min(tried, key=lambda cuts: sum(cost(sizes, inputs, cuts)))
    return [list(row[a:b]) for a, b in zip(best, [*best[1:], len(row)], strict=True)]


def walk(sizes: Sequence[int], inputs: Sequence[int], b: float) -> list[int]:  # noqa: ARG001
    """Where segments begin: a new one whenever the running sum would pass `b`."""
    cuts, running = [0], 0
    for i, size in enumerate(sizes):
        if i and running + size > b:
            cuts.append(i)
            running = 0
        running += size
    return cuts


def cost(sizes: Sequence[int], inputs: Sequence[int], cuts: Sequence[int]) -> tuple[int, int]:
    """(bytes of the kept inputs, bytes of the largest segment)."""
    ends = [*cuts[1:], len(sizes)]
    return sum(inputs[c] for c in cuts), max(sum(sizes[a:b]) for a, b in zip(cuts, ends, strict=True))


def held_bytes(trace: Trace, block: Block) -> int:
    """What the block makes and autograd holds."""
    saved = {trace.saves[i].tensor for i in block.saves}
    return sum(trace.tensors[x].nbytes for x in saved if block.first <= trace.tensors[x].born <= block.last)


def input_bytes(trace: Trace, block: Block) -> int:
    return sum(trace.tensors[x].nbytes for x in block.inputs if trace.tensors[x].born >= 0)


def _largest(trace: Trace, segments: Sequence[Sequence[Block]]) -> int:
    return max((sum(held_bytes(trace, b) for b in s) for s in segments), default=0)


_VARIANTS = {"sqrt": sqrt_segments, "greedy": greedy_segments, "all": all_segments}
