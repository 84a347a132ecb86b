"""From lifetimes to an arena: the requests of a step that lie there, each with its offset. Standard library only.

Weights, optimizer states and the batch are there before a step, and stay where they are. Small requests are left to the
device's own allocator, which packs them well, so that those that remain are easy to tell apart by their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from holdall.types.info import PlannedLayout
from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes

SMALLEST = (1 << 20, 1 << 16, 0)  # bytes; CUDA's allocator serves requests up to the first from a pool of their own
LITTLE = 0.01  # the share of a step's bytes that may be left to it


class Offsets(Protocol):
    @property
    def reserved(self) -> Bytes: ...

    @property
    def offsets(self) -> Sequence[Bytes] | None: ...


class StaticLayout(Protocol):
    """A member of `layouts` that knows every offset before the step."""

    @property
    def name(self) -> str: ...

    def __call__(self, lifetimes: StepLifetimes) -> Offsets: ...


def is_placed(lifetimes: StepLifetimes, number: int, smallest: Bytes) -> bool:
    tensor = lifetimes.tensors[number]
    return tensor.begin > 0 and tensor.size >= smallest


def smallest_of(lifetimes: StepLifetimes) -> Bytes:
    """Requests of fewer bytes are small; lower where they are more than a little of the step."""
    born = [tensor for tensor in lifetimes.tensors if tensor.begin > 0]
    load = replace(lifetimes, tensors=tuple(born)).load
    for size in SMALLEST:
        if replace(lifetimes, tensors=tuple(t for t in born if t.size < size)).load <= LITTLE * load:
            break
    return size


def lay_out(member: StaticLayout, lifetimes: StepLifetimes, smallest: Bytes | None = None) -> PlannedLayout:
    """The arena of a step, for requests of at least `smallest` bytes."""
    smallest = smallest_of(lifetimes) if smallest is None else smallest
    placed = [n for n in range(len(lifetimes.tensors)) if is_placed(lifetimes, n, smallest)]
    chosen = replace(lifetimes, tensors=tuple(lifetimes.tensors[n] for n in placed), dynamic=frozenset())
    emptiest = min(range(chosen.period), key=chosen.loads.__getitem__)  # few tensors are alive from one step to the next there
    turned, numbers = chosen.turned(emptiest)
    found = member(turned)
    assert found.offsets is not None, f"{member.name} gives no offsets"
    offsets = dict(zip(numbers, found.offsets, strict=True))
    return PlannedLayout(
        name=member.name,
        reserved=found.reserved,
        align=lifetimes.align,
        smallest=smallest,
        sizes=tuple(tensor.size for tensor in chosen.tensors),
        offsets=tuple(offsets[n] for n in range(len(placed))),
        brief=tuple(n for n, tensor in enumerate(chosen.tensors) if tensor.key < 0),
    )
