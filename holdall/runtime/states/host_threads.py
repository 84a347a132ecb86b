"""Chooses the number of threads for an update on the host.

During backward, a quarter of the cores is left to the launching thread. An update that the next forward waits for may use all
cores but one; whether that is faster depends on what limits the host, cores or memory. So the first such updates alternate
between the two numbers, and the faster one is kept.
"""

from __future__ import annotations

import os

import torch

_EACH = 12  # updates with each number before choosing
_GAIN = 1.03  # more threads must be faster by more than the noise


def host_threads(device: torch.device) -> tuple[int, int]:
    """(threads while the launching thread is busy, threads while it waits)."""
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
        """Threads for an update that the loop will wait for."""
        if self._chosen is not None:
            return self._chosen
        return min(self._seen, key=lambda n: (self._seen[n][0], n))

    def took(self, threads: int, elements: int, seconds: float) -> None:
        """Record a finished update of this kind."""
        if self._chosen is not None:
            return
        updates, before, spent = self._seen[threads]
        self._seen[threads] = updates + 1, before + elements, spent + seconds
        if all(updates >= _EACH for updates, _, _ in self._seen.values()):
            rate = {n: elements / max(spent, 1e-9) for n, (_, elements, spent) in self._seen.items()}
            self._chosen = self._many if rate[self._many] > _GAIN * rate[self.few] else self.few
