"""Orders in which tensors are placed, and what every static layout does first: tensors that never go lie at the bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdall.packing import LaidOut
from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes


class Ground(NamedTuple):
    """The tensors that are always there, end to end from 0, and the others."""

    offsets: dict[int, Bytes]
    others: list[int]  # numbers of the tensors that are not always there
    floor: Bytes  # where these begin


def lay_ground(lifetimes: StepLifetimes) -> Ground:
    """Nothing is lost by it: in any layout, a tensor that is always there can be moved to the bottom."""
    offsets, others, top = {}, [], 0
    for number, tensor in enumerate(lifetimes.tensors):
        if lifetimes.is_permanent(number):
            offsets[number] = top
            top += tensor.size
        else:
            others.append(number)
    return Ground(offsets, others, top)


def laid_out(lifetimes: StepLifetimes, offsets: Mapping[int, Bytes], **notes: int) -> LaidOut:
    """The result of a static layout, from the offset of every tensor."""
    ordered = tuple(offsets[number] for number in range(len(lifetimes.tensors)))
    top = max((offset + t.size for offset, t in zip(ordered, lifetimes.tensors, strict=True)), default=0)
    return LaidOut(reserved=top, offsets=ordered, notes=notes)


def by_size(lifetimes: StepLifetimes, numbers: Sequence[int]) -> list[int]:
    """Largest first; among equals, the longest-lived first."""
    return sorted(numbers, key=lambda n: (-lifetimes.tensors[n].size, -lifetimes.length(n), n))


def by_area(lifetimes: StepLifetimes, numbers: Sequence[int]) -> list[int]:
    """Largest product of size and length first."""
    return sorted(numbers, key=lambda n: (-lifetimes.tensors[n].size * lifetimes.length(n), n))


def by_length(lifetimes: StepLifetimes, numbers: Sequence[int]) -> list[int]:
    """Longest-lived first; among equals, the largest first."""
    return sorted(numbers, key=lambda n: (-lifetimes.length(n), -lifetimes.tensors[n].size, n))
