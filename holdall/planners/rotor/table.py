"""The least time to run a stretch of a chain forward and backward in m bytes, by recomputation alone: rotor's table.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (arXiv 1911.13214). A stage
is run in one of two forms, keeping its input or everything, and what was dropped may be run again any number of times:

    C(s, t, m) = min  uf[s..j-1] + C(j, t, m - a[j]) + C(s, j-1, m)      s keeps its input, the sweep goes on to j
                      uf[s] + C(s+1, t, m - kept[s]) + ub[s]             s keeps everything; kept: without input, with output

The input of s lies outside m, the gradient after t inside. The last stage is the loss: its output takes no bytes. Time and
memory grow with the cube and the square of the number of stages, both in proportion to m: sizes may be in slots.

With menus (Rockmate), "everything" is one of several forms that the second line chooses from, at every stage and every depth.

Beyond the paper: what the backward of a stage leaves behind for good (`g`, the gradients of its weights) is missing to the
backward of all stages before it, and a forward that backward follows at once may end early (`stop`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from holdall.types import Choice

NEVER = float("inf")

Row = npt.NDArray[np.float64]  # by m


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a chain, in the papers' letters. Times in any unit, sizes in whole bytes (or slots)."""

    uf: float  # forward time
    ub: float  # backward time
    a: int  # bytes of its input
    abar: int  # bytes of everything saved for its backward, its input included
    of: int = 0  # bytes that come and go in its forward
    ob: int = 0  # the same in its backward
    g: int = 0  # bytes that its backward leaves behind
    stop: float = 0.0  # forward time that is not spent where its backward follows at once


@dataclass(frozen=True, slots=True)
class Dropped:
    """Stages first..last keep the input of the first alone; `items` is how they are run when backward comes to them."""

    first: int
    last: int
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """A stage that runs by a line of its menu (Rockmate)."""

    stage: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class Form:
    """A way to run a stage forward that leaves what its backward needs, and that backward."""

    item: Taken | int
    kept: int  # bytes that are held, without the input and with the output
    ub: float  # backward time, with what is run again in it
    of: int  # bytes that come and go in forward
    ob: int  # the same in backward
    stop: float = 0.0  # forward time that is not spent where the backward follows at once


Item = Dropped | Taken | int
"""A stretch of stages, a stage that takes a line of its menu, or one that keeps everything."""


class Table:
    """C(s, t, m) for every stretch of a chain and every m up to `memory`.

    `whole`: false forbids to keep everything but where backward follows at once, which is Revolve (Griewank, Walther 2000).
    `rows`: the stages that may be dropped together lie in one row (by default all do): a number for each stage.
    `menus`: for each stage, forms in which it may be run beside the one that keeps everything (Rockmate).
    """

    def __init__(
        self,
        chain: Sequence[Stage],
        memory: int,
        *,
        whole: bool = True,
        rows: Sequence[int] | None = None,
        menus: Sequence[Sequence[Form]] = (),
    ) -> None:
        self._forms = [(_whole(n, stage, out), *line) for n, (stage, out, line) in enumerate(_along(chain, menus))]
        self._chain = chain
        self._memory = memory
        self._whole = whole
        self._group = list(rows) if rows is not None else [0] * len(chain)
        self._a = [*(stage.a for stage in chain), 0]
        self._sums = np.array([0.0, *accumulate(stage.uf for stage in chain)])
        self._left = np.array([0, *accumulate(stage.g for stage in chain)])
        n = len(chain)
        self._from: list[Row] = [np.full((n - s, memory + 1), NEVER) for s in range(n)]  # [s][t - s]: C(s, t, .)
        self._after: list[Row] = [np.full((t + 1, memory + 1), NEVER) for t in range(n)]  # [t][s]: C(s, t, . - a[s])
        for length in range(n):
            for s in range(n - length):
                t = s + length
                row = self._row(s, t)
                self._from[s][length] = row
                self._after[t][s] = _shifted(row, self._a[s])

    def seconds(self, s: int, t: int, m: int) -> float:
        """The least time for stages s..t in m bytes; infinite: it cannot be done."""
        return NEVER if m < 0 else float(self._from[s][t - s][min(m, self._memory)])

    def stairs(self, s: int, t: int) -> list[tuple[int, float]]:
        """(m, time) wherever one more byte saves time, by m."""
        row = self._from[s][t - s]
        lower = np.flatnonzero(row < np.concatenate(([NEVER], row[:-1])))
        return [(int(m), float(row[m])) for m in lower]

    def items(self, s: int, t: int, m: int) -> tuple[Item, ...]:
        """How stages s..t are run in m bytes in the least time; it must be possible."""
        m = min(m, self._memory)
        found: list[Item] = []
        while s <= t:
            best = self.seconds(s, t, m)
            seconds, form = min(((float(self._form_row(s, t, f)[m]), f) for f in self._forms[s]), key=lambda pair: pair[0])
            if seconds <= best:
                found.append(form.item)
                s, m = s + 1, m - form.kept
                continue
            j = s + 1 + int(np.argmin(self._splits(s, t)[:, m]))
            found.append(Dropped(s, j - 1, self.items(s, j - 1, m - self._behind(j, t))))
            s, m = j, m - self._a[j]
        return tuple(found)

    def _row(self, s: int, t: int) -> Row:
        best: Row = np.minimum.reduce([self._form_row(s, t, form) for form in self._forms[s]])
        if s == t:
            return best
        chain, a = self._chain, self._a
        splits = self._splits(s, t)
        if len(splits):
            best = np.minimum(best, splits.min(axis=0))
        inside = (a[j] + a[j + 1] + chain[j].of for j in range(s + 1, t))
        return _from(a[t + 1] + max(a[s + 1] + chain[s].of, *inside, 0), best)

    def _behind(self, s: int, t: int) -> int:
        """Bytes that the backward of s..t leaves behind."""
        return int(self._left[t + 1] - self._left[s])

    def _form_row(self, s: int, t: int, form: Form) -> Row:
        """The time for s..t by m, where s is run in this form."""
        stage, a = self._chain[s], self._a
        least = max(a[s + 1] + form.kept + form.of, a[s] + form.kept + form.ob + self._behind(s + 1, t))
        if s == t:
            return _from(least, np.full(self._memory + 1, float(stage.uf - form.stop + form.ub)))
        if not self._whole and self._group[s] == self._group[t]:
            return np.full(self._memory + 1, NEVER)
        return _from(least, stage.uf + form.ub + _shifted(self._from[s + 1][t - s - 1], form.kept))

    def _splits(self, s: int, t: int) -> Row:
        """[j - s - 1]: the time for s..t by m, where s..j-1 are dropped."""
        end = s + 1
        while end <= t and self._group[end - 1] == self._group[s]:
            end += 1
        count = end - s - 1  # j = s + 1 .. end - 1
        sweep = self._sums[s + 1 : end] - self._sums[s]
        later, again = self._after[t][s + 1 : end], self._from[s][:count]
        missing = self._left[t + 1] - self._left[s + 1 : end]
        splits: Row = sweep[:, None] + later + (_each_shifted(again, missing) if missing.any() else again)
        return splits


def needed(chain: Sequence[Stage], items: Sequence[Item], last: int) -> int:
    """The least bytes in which a schedule of whole and dropped stages up to `last` can be run."""
    a = [*(stage.a for stage in chain), 0]
    item = items[0]
    first = item.first if isinstance(item, Dropped) else item.stage if isinstance(item, Taken) else item
    behind = sum(stage.g for stage in chain[first + 1 : last + 1])
    if not isinstance(item, Dropped):
        form = _whole(first, chain[first], a[first + 1])
        own = max(a[first + 1] + form.kept + form.of, a[first] + form.kept + form.ob + behind)
        if first == last:
            return own
    inside = (a[j] + a[j + 1] + chain[j].of for j in range(first + 1, last))
    floor = a[last + 1] + max([a[first + 1] + chain[first].of, *inside])
    rest = needed(chain, items[1:], last)
    if not isinstance(item, Dropped):
        return max(floor, own, form.kept + rest)
    after = sum(stage.g for stage in chain[item.last + 1 : last + 1])
    return max(floor, a[item.last + 1] + rest, needed(chain, item.items, item.last) + after)


def _along(chain: Sequence[Stage], menus: Sequence[Sequence[Form]]) -> Iterator[tuple[Stage, int, Sequence[Form]]]:
    """Each stage with the bytes of what it returns, and its menu."""
    after = [*(stage.a for stage in chain[1:]), 0]
    return zip(chain, after, [*menus, *([()] * (len(chain) - len(menus)))], strict=True)


def _whole(n: int, stage: Stage, out: int) -> Form:
    """Stage n with everything kept."""
    return Form(n, stage.abar - stage.a + out, stage.ub, stage.of, stage.ob, stage.stop)


def _from(least: int, row: Row) -> Row:
    """The row, impossible below `least`."""
    row = row.copy()
    row[: max(0, least)] = NEVER
    return row


def _shifted(row: Row, size: int) -> Row:
    """The row in `size` bytes less."""
    if size <= 0:
        return row
    moved = np.full_like(row, NEVER)
    moved[size:] = row[: max(0, len(row) - size)]
    return moved


def _each_shifted(rows: Row, sizes: npt.NDArray[np.int64]) -> Row:
    """Each row in as many bytes less."""
    at = np.arange(rows.shape[1]) - sizes[:, None]
    return np.where(at < 0, NEVER, np.take_along_axis(rows, np.maximum(at, 0), axis=1))
