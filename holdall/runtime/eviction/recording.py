"""What a pool records in a step, so that the next step knows when each storage is used again.

Ops are numbered in their order, storages by the order in which they were made (`Storage.born`). Time is the sum of the ops' own
costs, without recomputation and without waiting. A step that takes another course than the recorded one stops using it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from holdall.runtime.eviction.storages import Maker, Storage
from holdall.types.trace import Bytes


class RecordedOp(NamedTuple):
    label: str
    reads: tuple[int, ...]  # storages, by the order in which they were made
    makes: Bytes
    begins: float  # cost of all ops before


class UseRecord:
    """One step, op by op."""

    def __init__(self) -> None:
        self.ops: list[RecordedOp] = []
        self.clock = 0.0
        self._live: Bytes = 0  # of storages that the step made and the program refers to, evicted or not
        self._lives: list[Bytes] = []  # at each op, with its results
        self._uses: dict[int, list[int]] = {}  # storage -> ops that read it
        self._dead: set[int] = set()  # storages that the program let go before the end of the step
        self._ahead: list[Bytes] = []

    def ran(self, maker: Maker, made: Sequence[Storage]) -> None:
        makes = sum(s.size for s in made)
        reads = tuple(s.born for s in maker.inputs)
        for number in reads:
            self._uses.setdefault(number, []).append(len(self.ops))
        self.ops.append(RecordedOp(maker.label, reads, makes, self.clock))
        self.clock += maker.cost
        self._live += makes
        self._lives.append(self._live)

    def died(self, s: Storage) -> None:
        self._live -= s.size
        self._dead.add(s.born)

    def next_use(self, s: Storage, at: int) -> int | None:
        """The first op after number `at` that reads the storage; one beyond the last, if it outlives the step."""
        uses = self._uses.get(s.born, ())
        n = bisect_right(uses, at)
        if n < len(uses):
            return uses[n]
        return len(self.ops) if s.alive and s.born not in self._dead else None

    def until(self, op: int, at: int) -> float:
        """Time from the beginning of one op to that of a later one."""
        return self._begins(op) - self._begins(at)

    def _begins(self, op: int) -> float:
        return self.ops[op].begins if op < len(self.ops) else self.clock

    def growth_from(self, at: int) -> Bytes:
        """Bytes that the step will hold at most from this op on, beyond those before it, if nothing is evicted."""
        if len(self._ahead) != len(self._lives):
            self._ahead, most = [], -math.inf
            for live in reversed(self._lives):
                most = max(most, live)
                self._ahead.append(int(most))
            self._ahead.reverse()
        return self._ahead[at] - (self._lives[at - 1] if at else 0)
