"""How many threads an update on the host gets.

While backward goes on, a quarter of the processors is left to whoever launches the device's work. An update that the next
forward waits for may have all but one; whether that is faster depends on what limits the host, its cores or its memory. So the
first of them are made with each number in turn, and the one that was faster stays.
"""

from __future__ import annotations

import os

import torch

_EACH = 12  # updates with either number before one is chosen
_GAIN = 1.03  # more threads must be faster by more than updates differ anyway


def host_threads(device: torch.device) -> tuple[int, int]:
    """(beside a launcher that is busy, while everybody waits)"""
    if device.type == "cpu":
        return torch.get_num_threads(), torch.get_num_threads()
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count * 3 // 4), max(1, count - 1)


class Threads:
    """Chooses between two numbers by measuring."""

    def __init__(self, few: int, many: int) -> None:
        self.few = few
        self._many = many
        self._chosen = few if few == many else None
        self._seen: dict[int, tuple[int, int, float]] = {few: (0, 0, 0.0), many: (0, 0, 0.0)}  # updates, elements, seconds

    def awaited(self) -> int:
        """For an update that the loop will wait for."""
        if self._chosen is not None:
            return self._chosen
        return min(self._seen, key=lambda n: (self._seen[n][0], n))

    def took(self, threads: int, elements: int, seconds: float) -> None:
        """An update of this kind is over."""
        if self._chosen is not None:
            return
        updates, before, spent = self._seen[threads]
        self._seen[threads] = updates + 1, before + elements, spent + seconds
        if all(updates >= _EACH for updates, _, _ in self._seen.values()):
            rate = {n: elements / max(spent, 1e-9) for n, (_, elements, spent) in self._seen.items()}
            self._chosen = self._many if rate[self._many] > _GAIN * rate[self.few] else self.few
