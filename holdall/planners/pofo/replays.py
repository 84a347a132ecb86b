"""Bytes and seconds of the backward of a recomputed segment of our blocks, for each nesting of its replay.

Replayed once and as a whole, a segment needs exactly the bytes of the untouched step and the menus. Less is needed where the
replay frees again the saved tensors of some of its blocks: rotor's table holds every such nesting of a chain of sizes, and the
bytes that each saves against the whole replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from holdall.actions.recompute import Inner
from holdall.planners.pofo.program import Node
from holdall.planners.rotor import chain_of, enough, in_slots, nested_segments, row_numbers
from holdall.planners.rotor.table import Item as Nesting
from holdall.planners.rotor.table import Stage, Table, needed
from holdall.planning.menus import Item, MenuLine
from holdall.planning.segments import runs
from holdall.types import Block, Problem

_SLOTS = 200  # of the table of nestings
_LINES = 8  # nestings per segment in the menu


class Replays:
    """The backward of segments: lines of (bytes on top of K, seconds), sorted by bytes; the whole replay is the last."""

    def __init__(
        self,
        problem: Problem,
        menus: Sequence[Item],
        nodes: Sequence[Node],
        again: Sequence[MenuLine | None],
        between: Sequence[int],
    ) -> None:
        self._problem = problem
        self._menus, self._nodes, self._again, self._between = menus, nodes, again, between
        self._rows = runs(problem.trace)
        self._blocks = [block for row in self._rows for block in row]
        self._found: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._nestings: dict[tuple[int, int, int], tuple[Nesting, ...]] = {}

    def __call__(self, s: int, t: int) -> list[tuple[int, float]]:
        if (s, t) not in self._found:
            whole = self._replay(s, t)
            self._found[s, t] = [*self._nested(s, t, whole), whole] if t > s else [whole]
        return self._found[s, t]

    def inner(self, s: int, t: int, need: int) -> tuple[Inner, ...]:
        """The inner segments of the replay of s..t that needs this many bytes."""
        return nested_segments(self._blocks, self._nestings.get((s, t, need), ()))

    def _replay(self, s: int, t: int) -> tuple[int, float]:
        """After the replay, memory is as in the untouched step; during it, blocks are in memory up to the running one."""
        menus, nodes, last = self._menus, self._nodes, self._again[t]
        assert last is not None
        seconds = sum(nodes[j].uf for j in range(s, t)) + last.seconds + sum(nodes[j].ub for j in range(s, t + 1))
        if s == t:
            return nodes[s].input[0].backward, seconds
        need = max(nodes[j].full[0].backward for j in range(s, t + 1))
        live = menus[t].before_backward
        for j in range(t, s - 1, -1):
            live += nodes[j].input[0].pinned  # without the bytes that block j recomputes
            need = max(need, live + menus[j].choices[0].forward)
            if j > s:
                live -= self._between[j]
        return need, seconds

    def _nested(self, s: int, t: int, whole: tuple[int, float]) -> list[tuple[int, float]]:
        """Slower lines that need less memory than the whole replay."""
        first, last = self._stage(self._menus[s].block), self._stage(self._menus[t].block)
        chain, stairs = self._chain, self._table.stairs(first, last)
        if not stairs:
            return []
        most = needed(chain, tuple(range(first, last + 1)), last)
        step = max(1, -(-len(stairs) // _LINES))
        found: list[tuple[int, float]] = []
        for m, seconds in stairs[:-1][::step]:
            items = self._table.items(first, last, m)
            need = whole[0] - most + needed(chain, items, last)
            if need < whole[0] and (not found or need > found[-1][0]):
                found.append((need, whole[1] + seconds - stairs[-1][1]))
                self._nestings[s, t, need] = items
        return found

    @cached_property
    def _chain(self) -> list[Stage]:
        return chain_of(self._problem, self._rows)

    @cached_property
    def _table(self) -> Table:
        unit = max(1, -(-enough(self._chain) // _SLOTS))
        return Table(in_slots(self._chain, unit), _SLOTS + 1 + len(self._chain), rows=row_numbers(self._rows))

    @cached_property
    def _stages(self) -> dict[int, int]:
        return {block.id: n for n, block in enumerate(self._blocks)}

    def _stage(self, block: Block) -> int:
        return self._stages[block.id]
