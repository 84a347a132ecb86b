"""The best choice for every block of a chain under a budget, by dynamic programming.

The shape is that of pofo (Beaumont et al., NeurIPS 2021): forward and backward of a block nest around those of all later
blocks, so one walk in forward order sees both. Its state is the bytes freed by earlier blocks, and the bytes of the preceding
block that are still being copied: a copy is hidden by the forward of the next block, its return by that block's backward.
More freed is never worse, so only states that no other dominates in time and freed bytes are carried on.

Where the device waits for the thread that launches its ops, a block takes as long as its launches, and copies also go on while
the device waits: `by_launches` counts so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdall.cost.link import reach
from holdall.planning.menus import Item, MenuLine
from holdall.types import Hardware

_STATES = 1000  # beyond this number, only the fastest of states within a thousandth of the budget is kept

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Tail:
    """Open copies of the preceding block; states with the same tail can be compared."""

    late: int = 0  # bytes that are free only after this block's forward
    out: int = 0  # bytes still to be copied
    back: int = 0
    tier: str = ""  # destination


@dataclass(frozen=True, slots=True)
class _Front:
    """States with one tail that no other dominates: the more is freed, the longer it took."""

    seconds: npt.NDArray[np.float64]
    freed: Ints  # by blocks whose memory is certainly free here
    path: Ints  # rows of the walk's list of (state before, choice)


def best_choices(
    items: Sequence[Item], budget: int, hardware: Hardware, *, by_launches: bool = False
) -> tuple[float, list[MenuLine]] | None:
    """The least extra seconds and a choice per item, or None if no combination stays within the budget."""
    walk = _Walk(budget, hardware, by_launches=by_launches)
    for item in items:
        walk.extend(item)
        if not walk.fronts:
            return None
    seconds, picks = walk.best()
    return seconds, [item.choices[n] for item, n in zip(items, picks, strict=True)]


class _Walk:
    """The states after one block after the other."""

    def __init__(self, budget: int, hardware: Hardware, *, by_launches: bool) -> None:
        self._budget = budget
        self._by_launches = by_launches
        names = [tier.name for tier in hardware.others]
        self._reach = {name if n else "": reach(hardware, name) for n, name in enumerate(names)}
        self._before: list[Ints] = []  # for every state ever kept, the state before it, item by item
        self._choice: list[Ints] = []
        self._count = 0
        zero = np.zeros(1, dtype=np.int64)
        self.fronts: dict[_Tail, _Front] = {_Tail(): _Front(np.zeros(1), zero, zero - 1)}

    def extend(self, item: Item) -> None:
        """Add every choice for the next block that fits on top of a state."""
        grown: dict[_Tail, list[tuple[Any, Ints, Ints, int]]] = {}
        for tail, front in self.fronts.items():
            for n, choice in enumerate(item.choices):
                needed = max(item.before_forward + choice.forward, item.before_backward + choice.backward) - self._budget
                fits = slice(int(np.searchsorted(front.freed, needed)), None)
                if fits.start == len(front.freed):
                    continue
                slow = choice.slow if choice.late else 0
                after = _Tail(slow, choice.out, choice.back, choice.choice.tier) if choice.late else _Tail()
                seconds = front.seconds[fits] + self._step_seconds(tail, item, choice)
                freed = front.freed[fits] + (tail.late + choice.freed - slow)
                grown.setdefault(after, []).append((seconds, freed, front.path[fits], n))
        self.fronts = self._thin({tail: _join(parts) for tail, parts in grown.items()})

    def _thin(self, joined: dict[_Tail, tuple[Any, Ints, Ints, Ints]]) -> dict[_Tail, _Front]:
        grain = max(1, self._budget // 1000) if sum(len(j[0]) for j in joined.values()) > _STATES else 0
        fronts = {}
        for tail, (seconds, freed, before, choice) in joined.items():
            keep: Any = slice(None)
            if grain:
                keep = np.unique(freed // grain, return_index=True)[1]
            rows = np.arange(self._count, self._count + len(seconds[keep]), dtype=np.int64)
            self._count += len(rows)
            self._before.append(before[keep])
            self._choice.append(choice[keep])
            fronts[tail] = _Front(seconds[keep], freed[keep], rows)
        return fronts

    def best(self) -> tuple[float, list[int]]:
        """The least seconds and the choices that give them."""
        ends = [(float(f.seconds[0]) + self._tail_seconds(t), int(f.path[0])) for t, f in self.fronts.items()]
        seconds, row = min(ends)
        before, choice = np.concatenate(self._before), np.concatenate(self._choice)
        picks = []
        while row >= 0:
            picks.append(int(choice[row]))
            row = int(before[row])
        return seconds, picks[::-1]

    def _step_seconds(self, tail: _Tail, item: Item, choice: MenuLine) -> float:
        """Seconds that a choice adds: recomputation, and copies that nothing hides."""
        seconds = again = max(choice.seconds, choice.launching) if self._by_launches else choice.seconds
        forward, backward, idle_ahead, idle_behind = self._times(item)
        if tail.out or tail.back:
            before = self._reach[tail.tier]
            if tail.out:
                seconds += max(0.0, before.latency + tail.out / before.write - forward)
            if tail.back:
                seconds += max(0.0, before.latency + tail.back / before.read - backward - again)
        if not choice.late and choice.out:
            there = self._reach[choice.choice.tier]
            seconds += max(0.0, there.latency + choice.out / there.write - idle_ahead)
            seconds += max(0.0, there.latency + choice.back / there.read - idle_behind)
        return seconds

    def _times(self, item: Item) -> tuple[float, float, float, float]:
        """Seconds of the block's forward and backward, and how long the device waits for launches in each."""
        ahead, behind = item.forward_seconds, item.backward_seconds
        if not self._by_launches:
            return ahead, behind, 0.0, 0.0
        forward, backward = max(ahead, item.forward_launching), max(behind, item.backward_launching)
        return forward, backward, forward - ahead, backward - behind

    def _tail_seconds(self, tail: _Tail) -> float:
        """Copies of the last block: no later block hides them."""
        if not tail.out:
            return 0.0
        there = self._reach[tail.tier]
        return 2 * there.latency + tail.out / there.write + tail.back / there.read


def _join(parts: list[tuple[Any, Ints, Ints, int]]) -> tuple[Any, Ints, Ints, Ints]:
    """States from several choices in one front, sorted by freed bytes."""
    seconds = np.concatenate([p[0] for p in parts])
    freed = np.concatenate([p[1] for p in parts])
    before = np.concatenate([p[2] for p in parts])
    choice = np.concatenate([np.full(len(p[0]), p[3], dtype=np.int64) for p in parts])
    order = np.lexsort((-freed, seconds))
    most = np.maximum.accumulate(freed[order])
    order = order[np.concatenate(([True], freed[order][1:] > most[:-1]))]
    return seconds[order], freed[order], before[order], choice[order]
