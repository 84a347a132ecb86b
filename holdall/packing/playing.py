"""Plays the allocations and frees of a few steps over an allocator's model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes


class Served(Protocol):
    """What an allocator's model must do here."""

    def alloc(self, key: int, nbytes: Bytes) -> None: ...

    def free(self, key: int) -> None: ...


def play(lifetimes: StepLifetimes, allocator: Served, steps: int) -> Iterator[int]:
    """Yields the number of each step when it is over. The first one finds no cached memory."""
    for number, events in enumerate(lifetimes.events(steps)):
        for tensor, is_free in events:
            if is_free:
                allocator.free(tensor)
            else:
                allocator.alloc(tensor, lifetimes.tensors[tensor].size)
        if number:
            yield number
