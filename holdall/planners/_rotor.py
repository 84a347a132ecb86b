"""The least time to run a stretch of a chain forward and backward in m bytes, by recomputation alone: rotor's table.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (arXiv 1911.13214). A stage
is run in one of two forms, keeping its input or everything, and what was dropped may be run again any number of times:

    C(s, t, m) = min  uf[s..j-1] + C(j, t, m - a[j]) + C(s, j-1, m)      s keeps its input, the sweep goes on to j
                      uf[s] + C(s+1, t, m - kept[s]) + ub[s]             s keeps everything; kept: without input, with output

The input of s lies outside m, the gradient after t inside. The last stage is the loss: its output takes no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a chain, in the papers' letters. Times in any unit, sizes in whole bytes (or slots)."""

    uf: float  # forward time
    ub: float  # backward time
    a: int  # bytes of its input
    abar: int  # bytes of everything saved for its backward, its input included
    of: int = 0  # bytes that come and go in its forward
    ob: int = 0  # the same in its backward


class Table:
    """C(s, t, m) for every stretch of a chain and every m up to `memory`."""

    def __init__(self, chain: Sequence[Stage], memory: int) -> None:
        self._chain = chain
        self._memory = memory
        self._a = [*(stage.a for stage in chain), 0]
        self._sums = [0.0, *accumulate(stage.uf for stage in chain)]
        self._rows: dict[tuple[int, int], list[float]] = {}
        for length in range(len(chain)):
            for s in range(len(chain) - length):
                self._rows[s, s + length] = self._row(s, s + length)

    def seconds(self, s: int, t: int, m: int) -> float:
        """The least time for stages s..t in m bytes; infinite: it cannot be done."""
        return NEVER if m < 0 else self._rows[s, t][min(m, self._memory)]

    def stairs(self, s: int, t: int) -> list[tuple[int, float]]:
        """(m, time) wherever one more byte saves time, by m."""
        row = self._rows[s, t]
        return [(m, row[m]) for m in range(len(row)) if row[m] < (row[m - 1] if m else NEVER)]

    def _row(self, s: int, t: int) -> list[float]:
        chain, a = self._chain, self._a
        stage = chain[s]
        kept = stage.abar - stage.a + a[s + 1]
        whole = max(a[s + 1] + kept + stage.of, a[s] + kept + stage.ob)
        if s == t:
            return self._from(whole, [stage.uf + stage.ub] * (self._memory + 1))
        inside = (a[j] + a[j + 1] + chain[j].of for j in range(s + 1, t))
        rest = self._shifted(self._rows[s + 1, t], kept)
        best = self._from(whole, [stage.uf + stage.ub + r for r in rest])
        for j in range(s + 1, t + 1):
            sweep = self._sums[j] - self._sums[s]
            later, again = self._shifted(self._rows[j, t], a[j]), self._rows[s, j - 1]
            best = [min(b, sweep + x + y) for b, x, y in zip(best, later, again, strict=True)]
        return self._from(a[t + 1] + max(a[s + 1] + stage.of, *inside, 0), best)

    def _from(self, least: int, row: list[float]) -> list[float]:
        """The row, impossible below `least`."""
        return [NEVER] * min(least, len(row)) + row[least:]

    def _shifted(self, row: list[float], size: int) -> list[float]:
        return ([NEVER] * size + row)[: len(row)]
