"""Caches streamed weights on the device in evaluations, in the memory that steps need for activations.

A forward without gradients needs little besides its weights, and a generation is one forward per token. The memory between its
own need and the budget keeps streamed weights on the device after their first use, so that the next forward does not fetch them
again. It is all freed before the next step begins.

The need of a forward is measured while it runs, per block call and without streamed weights, and stored by its kind of
arguments and their size. So the first forward of a kind streams as usual, and later ones keep weights. A growing key/value
cache takes memory back, unit by unit from the end, since the first units are needed soonest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.weights.streaming import Streaming

_HOLES = 32  # 1/32 of the budget may be lost to fragmentation
_SLACK = 8  # 1/8 of the need is left free for the next forward


class Gauge:
    """Measures memory against the budget. `busy`: a step is being measured and must not be disturbed."""

    def __init__(
        self, budget: int, *, ledger: Ledger | None, device: torch.device, outside: int, busy: Callable[[], bool]
    ) -> None:
        self.busy = busy
        self._budget = budget - outside - (0 if ledger is not None else budget // _HOLES)
        self._ledger = ledger
        self._device = device
        self._before = (0, "")

    def live(self) -> int:
        return self._ledger.live if self._ledger is not None else torch.cuda.memory_allocated(self._device)

    def room(self) -> int:
        return self._budget - self.live()

    def open(self) -> None:
        """Begin to measure the peak of an evaluation."""
        if self._ledger is not None:
            self._before = (self._ledger.peak, self._ledger.peak_op)
        self._restart()

    def look(self) -> int:
        """The peak since the last call."""
        peak = self._ledger.peak if self._ledger is not None else torch.cuda.max_memory_allocated(self._device)
        if self._ledger is not None:
            self._before = max(self._before, (peak, self._ledger.peak_op))
        self._restart()
        return peak

    def close(self) -> None:
        """Restore the overall peak."""
        if self._ledger is not None:
            now = (self._ledger.peak, self._ledger.peak_op)
            self._ledger.peak, self._ledger.peak_op = max(self._before, now)

    def _restart(self) -> None:
        if self._ledger is not None:
            self._ledger.peak, self._ledger.peak_op = self._ledger.live, "there before"
        else:
            torch.cuda.reset_peak_memory_stats(self._device)


class Lender:
    """Decides which streamed units stay on the device from one evaluation's forward to the next."""

    def __init__(self, streaming: Streaming, gauge: Gauge) -> None:
        self._streaming = streaming
        self._gauge = gauge
        self._known: dict[frozenset[str], dict[int, int]] = {}  # kind of call -> input size -> bytes needed, without weights
        self._needs: dict[int, int] = {}  # of the current kind
        self._lent: list[PlacedUnit] = []
        self._size: int | None = None  # input size of the current evaluation; None: there is none, or nothing may be cached
        self._reserve: int | None = None  # bytes to leave free for it; None: unknown
        self._base = self._need = 0

    @property
    def lent(self) -> list[PlacedUnit]:
        """Cached units, in the order of their use."""
        self._lent = [u for u in self._lent if u.is_here]  # others may have released some
        return self._lent

    def begin(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A forward begins; one with gradients frees the cache."""
        if self._size is not None:  # the previous forward failed: forget its measurements
            self._known.clear()
            self.give_back()
        self._size = None
        if torch.is_grad_enabled() or not self._streaming.is_needed or self._gauge.busy():
            self.give_back()
            return
        self._size = input_size(args, kwargs)
        kind = frozenset(name for name, value in kwargs.items() if value is not None)  # with a cache, with labels, or neither
        self._needs = self._known.setdefault(kind, {})
        need = self._expected(self._size)
        self._reserve = None if need is None else need + need // _SLACK
        if self._reserve is None:
            self.give_back()
        else:
            while self.lent and self._gauge.room() < self._reserve + self._slots():
                self._streaming.release(self._lent.pop())
        self._gauge.open()
        self._base, self._need = self._gauge.live(), 0

    def look(self) -> None:
        """Other weights are about to be fetched."""
        if self._size is not None and not self._is_settled():
            self._measure()

    def leave(self, unit: PlacedUnit) -> None:
        """A unit was just used: keep or free its weights."""
        if self._size is None:
            self._streaming.release(unit)
            return
        if self._is_settled():
            return
        self._measure()
        if unit.is_streamed and not self._keeps(unit):
            self._streaming.release(unit)
            self._gauge.look()  # restart the peak without it

    def _is_settled(self) -> bool:
        """Are all streamed units cached? Then nothing has to be measured."""
        return len(self.lent) == len(self._streaming.units)

    def _keeps(self, unit: PlacedUnit) -> bool:
        if unit in self.lent:
            return True
        passing = sum(u.layout.nbytes for u in self._streaming.here() if u is not unit and u not in self._lent)
        is_kept = self._reserve is not None and self._gauge.room() + passing >= self._reserve + self._slots(unit)
        if is_kept:
            self._lent.append(unit)
            self._base += unit.layout.nbytes
        return is_kept

    def end(self) -> None:
        """The forward is over: store its measured need."""
        if self._size is not None:
            self._measure()
            self._gauge.close()
            self._needs[self._size] = self._need
        self._size = None

    def give_back(self) -> None:
        for unit in self.lent:
            self._streaming.release(unit)
        self._lent = []

    def _expected(self, size: int) -> int | None:
        """The need of a forward, from a measured one of at least its size, or extrapolated from a smaller one."""
        larger = min((known for known in self._needs if known >= size), default=None)
        if larger is not None:
            return self._needs[larger]
        smaller = max(self._needs, default=None)
        if not smaller:
            return None
        return -(-self._needs[smaller] * size * size // (smaller * smaller))  # attention grows with the square, the rest less

    def _measure(self) -> None:
        """Update the measured need. Streamed weights on the device were there since the last measurement and are subtracted."""
        passing = sum(u.layout.nbytes for u in self._streaming.here() if u not in self._lent)
        self._need = max(self._need, self._gauge.look() - self._base - passing)

    def _slots(self, unit: PlacedUnit | None = None) -> int:
        """Bytes for streamed weights that are not cached, without `unit`: one in use and one being fetched."""
        rest = sorted((u.layout.nbytes for u in self._streaming.units if u is not unit and u not in self._lent), reverse=True)
        return sum(rest[:2])


def input_size(args: Any, kwargs: Mapping[str, Any]) -> int:
    """Elements of the inputs, without masks and caches, which grow from token to token."""
    named = [v for k, v in kwargs.items() if not any(word in k for word in ("mask", "past", "cache"))]
    return sum(t.numel() for t in tree_iter((args, named)) if isinstance(t, torch.Tensor))
