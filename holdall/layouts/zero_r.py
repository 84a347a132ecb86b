"""ZeRO-R's memory defragmentation (SC 2020): long-lived tensors have buffers made in advance, the others the caching allocator.

long-lived -> alive when backward begins (what forward left for it) or when the optimizer's step begins (gradients), but not
              always; each is made anywhere and copied into its slot
slots      -> for every size as many as are in use at one time, all in one buffer
others     -> the caching allocator, where lifetimes no longer mix
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from holdall.packing import LaidOut
from holdall.packing.playing import play
from holdall.simulator.allocators import Caching
from holdall.types.layout import round_up
from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes
from holdall.units import MiB

_ROUND = 2 * MiB  # of the buffer: a request of its own to the device


@dataclass(frozen=True, kw_only=True)
class ZeroR:
    """Contiguous buffers for what waits for backward and for gradients."""

    smallest: int = MiB  # bytes; smaller tensors come from the small pool, which they do not fragment
    steps: int = 3

    name: ClassVar[str] = "zero_r"
    paper: ClassVar[str] = "Rajbhandari et al., SC 2020 (ZeRO-R)"
    is_static: ClassVar[bool] = False

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        long = {n for n in range(len(lifetimes.tensors)) if self._is_long(lifetimes, n)}
        allocator = _Beside(lifetimes, long)
        for _ in play(lifetimes, allocator, self.steps):
            pass
        return LaidOut(
            reserved=round_up(allocator.buffer, _ROUND) + allocator.caching.peak_reserved, notes={"buffers": allocator.buffer}
        )

    def _is_long(self, lifetimes: StepLifetimes, number: int) -> bool:
        if lifetimes.is_permanent(number) or lifetimes.tensors[number].size < self.smallest:
            return False
        return any(lifetimes.is_alive(number, moment) and lifetimes.is_alive(number, moment - 1) for moment in lifetimes.phases)


class _Beside:
    """Slots by size for long-lived tensors, and a caching allocator for the others and for originals until they are copied."""

    def __init__(self, lifetimes: StepLifetimes, long: set[int]) -> None:
        self._lifetimes, self._long = lifetimes, long
        self._used: dict[Bytes, int] = defaultdict(int)
        self._slots: dict[Bytes, int] = defaultdict(int)
        self.caching = Caching()

    @property
    def buffer(self) -> Bytes:
        return sum(size * count for size, count in self._slots.items())

    @property
    def in_use(self) -> Bytes:
        return sum(size * count for size, count in self._used.items())

    def alloc(self, key: int, nbytes: Bytes) -> None:
        self.caching.alloc(key, nbytes)
        if key in self._long:
            self.caching.free(key)
            self._used[nbytes] += 1
            self._slots[nbytes] = max(self._slots[nbytes], self._used[nbytes])

    def free(self, key: int) -> None:
        if key in self._long:
            self._used[self._lifetimes.tensors[key].size] -= 1
        else:
            self.caching.free(key)
