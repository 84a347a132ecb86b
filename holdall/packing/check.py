"""Checks that tensors that are alive together share no bytes. Naive on purpose: it shares no code with what it checks."""

from __future__ import annotations

from bisect import bisect_left, insort

from holdall.packing import LaidOut
from holdall.types.lifetimes import StepLifetimes

_STEPS = 2  # what is alive across the end of a step meets the beginning of the next one


class Overlap(AssertionError):
    """Two tensors that are alive together share bytes, or a tensor lies outside of what is reserved."""


def check_layout(lifetimes: StepLifetimes, layout: LaidOut) -> None:
    """Walk the allocations and frees of two steps; raise `Overlap` at the first tensor that lies on another."""
    assert layout.offsets is not None, "an allocator's addresses are not known"
    live: list[tuple[int, int, int]] = []  # (first byte, last byte + 1, number)
    for events in lifetimes.events(_STEPS):
        for number, is_free in events:
            size, low = lifetimes.tensors[number].size, layout.offsets[number]
            entry = (low, low + size, number)
            if is_free:
                live.remove(entry)
                continue
            if low < 0 or low + size > layout.reserved or low % lifetimes.align:
                raise Overlap(f"tensor {number} lies at {low}, outside of the {layout.reserved} bytes or not aligned")
            at = bisect_left(live, entry)
            for other in live[max(at - 1, 0) : at + 1]:
                if other[0] < low + size and low < other[1]:
                    raise Overlap(f"tensors {number} and {other[2]} share bytes at {max(low, other[0])}")
            insort(live, entry)
