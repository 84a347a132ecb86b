"""Chen et al.: keep the inputs of segments, and recompute each segment when its backward begins.

"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. `sqrt`: about sqrt(n) segments of equal length; a fixed
rule that does not look at the budget. `greedy`: the paper's budgeted walk for unequal blocks, cutting whenever the bytes
since the last cut pass b, with b searched around sqrt(x * y). `all`: every block its own segment. `recursive`: k inputs are
kept, and each of the k + 1 segments between is treated the same way in its replay: k log_{k+1}(n) inputs at once, for
log_{k+1}(n) more forwards. `articulation`: every sqrt(|C|)-th of the cut points C, the boundaries that a single tensor
crosses. The last segment is not recomputed: its backward comes first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.recompute import Inner, Recompute
from holdall.errors import InvalidInput, unknown_name
from holdall.planning.finish import finish
from holdall.planning.segments import cut, runs
from holdall.types import Block, Phase, Plan, Problem, Trace
from holdall.units import format_bytes

_GRID = 24  # values of b tried between b* / sqrt(2) and b* sqrt(2)


@dataclass(frozen=True, kw_only=True)
class Chen:
    variant: str = "sqrt"
    last: bool = False  # also recompute the last segment
    k: int = 1  # inputs kept at every level of `recursive`
    count: int | None = None  # segments that are recomputed, from the first; None: all

    name: ClassVar[str] = "chen"
    paper: ClassVar[str] = "Chen et al. 2016, arXiv 1604.06174"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.variant not in (known := [*_VARIANTS, "recursive"]):
            raise unknown_name("variant of chen", self.variant, known)
        if self.k < 1:
            raise InvalidInput(
                f"`k` of chen is {self.k}; it must be at least 1", hint="give the inputs to keep per level, such as k=1"
            )
        if self.count is not None and self.count < 0:
            raise InvalidInput(
                f"`count` of chen is {self.count}", hint="give the number of segments to recompute, such as count=8"
            )
        segments = self.chosen(problem.trace)
        actions = [Recompute.of(problem.trace, s, inner=self._inner(s)) for s in segments]
        blocks = sum(len(s) for s in segments)
        why = [f"{self.variant}: {blocks} blocks in {len(segments)} segments are recomputed, their inputs kept"]
        if self.variant == "greedy":
            why.append(f"cut wherever a segment would hold more than {format_bytes(_largest(problem.trace, segments))}")
        if self.variant == "recursive":
            why.append(f"{self.k} inputs kept at every level, {_depth(actions)} levels")
        return finish(self, problem, actions, why=why, began=began)

    def chosen(self, trace: Trace) -> list[list[Block]]:
        """The segments that are recomputed."""
        segments = []
        for row in runs(trace):
            segments += self._segments(trace, row)
        if segments and not self.last:
            segments += self._unrolled(segments.pop())
        return segments[: self.count]

    def _segments(self, trace: Trace, row: Sequence[Block]) -> list[list[Block]]:
        if self.variant == "recursive":
            return parts(row, self.k)
        return _VARIANTS[self.variant](trace, row)

    def _unrolled(self, segment: list[Block]) -> list[list[Block]]:
        """The recomputed part of the last segment: its own segments except the last, level by level."""
        found: list[list[Block]] = []
        while self.variant == "recursive" and len(segment) > 1:
            *others, segment = parts(segment, self.k)
            found += others
        return found

    def _inner(self, segment: Sequence[Block]) -> tuple[Inner, ...]:
        """Segments of a segment's replay."""
        if self.variant != "recursive" or len(segment) < 2:
            return ()
        *others, last = parts(segment, self.k)
        own = tuple(Inner(blocks=tuple(b.name for b in part), inner=self._inner(part)) for part in others)
        return (*own, *self._inner(last))


def sqrt_segments(trace: Trace, row: Sequence[Block]) -> list[list[Block]]:  # noqa: ARG001
    return cut(row, math.ceil(len(row) / max(1, math.isqrt(len(row)))))


def all_segments(trace: Trace, row: Sequence[Block]) -> list[list[Block]]:  # noqa: ARG001
    return cut(row, 1)


def parts(row: Sequence[Block], k: int) -> list[list[Block]]:
    """k + 1 runs of nearly equal length; fewer where there are fewer blocks."""
    count = min(k + 1, len(row))
    ends = [len(row) * (n + 1) // count for n in range(count)]
    return [list(row[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def articulation_segments(trace: Trace, row: Sequence[Block]) -> list[list[Block]]:
    """A cut at every sqrt(|C|)-th of the cut points; where there are none, anywhere."""
    points = cut_points(trace, row) or list(range(1, len(row)))
    step = max(1, math.isqrt(len(points)))
    cuts = [0, *points[step - 1 :: step]]
    return [list(row[a:b]) for a, b in zip(cuts, [*cuts[1:], len(row)], strict=True)]


def cut_points(trace: Trace, row: Sequence[Block]) -> list[int]:
    """Blocks of a row whose input is a single tensor; tensors made before the row (masks, tables) are not counted."""
    begin, end = row[0].first, row[-1].backward
    last_use: dict[int, int] = {}
    for op in trace.ops[begin : end if end is None else end + 1]:
        if op.site.phase is Phase.FORWARD:
            last_use.update((x, op.id) for x in op.reads if trace.tensors[x].born >= begin)
    spans = [(trace.tensors[x].born, use) for x, use in last_use.items()]
    return [n for n, b in enumerate(row) if n and sum(born < b.first <= use for born, use in spans) <= 1]


def greedy_segments(trace: Trace, row: Sequence[Block]) -> list[list[Block]]:
    """The paper's Algorithm 3 with its search over b; the cut with the least (kept + largest segment) wins."""
    sizes = [held_bytes(trace, b) for b in row]
    inputs = [input_bytes(trace, b) for b in row]
    points = frozenset(cut_points(trace, row) or range(len(row)))
    first = walk(sizes, points, math.isqrt(sum(sizes) * max(sizes)))
    x, y = cost(sizes, inputs, first)
    centre = math.sqrt(max(1, x) * max(1, y))
    tried = [first]
    for n in range(_GRID + 1):
        tried.append(walk(sizes, points, centre * math.sqrt(2) ** (2 * n / _GRID - 1)))
    best = min(tried, key=lambda cuts: sum(cost(sizes, inputs, cuts)))
    return [list(row[a:b]) for a, b in zip(best, [*best[1:], len(row)], strict=True)]


def walk(sizes: Sequence[int], points: Collection[int], b: float) -> list[int]:
    """The starts of segments: a new one at a cut point whenever the running sum would pass `b`."""
    cuts, running = [0], 0
    for i, size in enumerate(sizes):
        if i and i in points and running + size > b:
            cuts.append(i)
            running = 0
        running += size
    return cuts


def cost(sizes: Sequence[int], inputs: Sequence[int], cuts: Sequence[int]) -> tuple[int, int]:
    """(bytes of the kept inputs, bytes of the largest segment)."""
    ends = [*cuts[1:], len(sizes)]
    return sum(inputs[c] for c in cuts), max(sum(sizes[a:b]) for a, b in zip(cuts, ends, strict=True))


def held_bytes(trace: Trace, block: Block) -> int:
    """Bytes that the block makes and autograd saves."""
    saved = {trace.saves[i].tensor for i in block.saves}
    return sum(trace.tensors[x].nbytes for x in saved if block.first <= trace.tensors[x].born <= block.last)


def input_bytes(trace: Trace, block: Block) -> int:
    return sum(trace.tensors[x].nbytes for x in block.inputs if trace.tensors[x].born >= 0)


def _largest(trace: Trace, segments: Sequence[Sequence[Block]]) -> int:
    return max((sum(held_bytes(trace, b) for b in s) for s in segments), default=0)


def _depth(segments: Sequence[Recompute | Inner]) -> int:
    return max((1 + _depth(s.inner) for s in segments), default=0)


_VARIANTS = {
    "sqrt": sqrt_segments,
    "greedy": greedy_segments,
    "all": all_segments,
    "articulation": articulation_segments,
}
