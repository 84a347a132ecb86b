"""When the tensors of a step are alive on the device, and how many bytes each needs; standard library only.

Moments are numbers of events: each allocation and each free is one. A tensor is alive in [begin, end).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from holdall.types.layout import round_up
from holdall.types.trace import Bytes


class Lifetime(NamedTuple):
    """One stay of a tensor on the device."""

    key: int  # the tensor; -1: the workspace of an op
    begin: int
    end: int  # not after `begin`: alive until the end of the step, and in the next one from its beginning until here
    size: Bytes  # a multiple of the alignment

    def spans(self, period: int) -> tuple[tuple[int, int], ...]:
        """The one or two ranges of moments in which it is alive."""
        if self.begin < self.end:
            return ((self.begin, self.end),)
        return tuple(span for span in ((self.begin, period), (0, self.end)) if span[0] < span[1])

    def wraps(self) -> bool:
        """Is it alive from one step to the next?"""
        return self.end <= self.begin


class Event(NamedTuple):
    """The allocation or the free of the tensor with this number."""

    number: int
    is_free: bool


@dataclass(frozen=True)
class StepLifetimes:
    """All stays of a step, in the order in which they begin. Steps repeat after `period` moments.

    Every size is a multiple of `align`, so sums of sizes are aligned too. Nothing of zero bytes is listed.
    """

    tensors: tuple[Lifetime, ...]
    period: int
    align: int = 1
    phases: tuple[int, ...] = ()  # moments at which backward and the optimizer's step begin
    dynamic: frozenset[int] = frozenset()  # numbers of tensors whose sizes are known only when they are allocated

    @cached_property
    def loads(self) -> list[Bytes]:
        """The bytes alive at every moment."""
        change = [0] * (self.period + 1)
        for tensor in self.tensors:
            for begin, end in tensor.spans(self.period):
                change[begin] += tensor.size
                change[end] -= tensor.size
        return list(accumulate(change[: self.period]))

    @cached_property
    def load(self) -> Bytes:
        """The most bytes alive at one moment: no layout can need less."""
        return max(self.loads, default=0)

    def turned(self, moment: int) -> tuple[StepLifetimes, list[int]]:
        """The same steps, counted from another moment on, and the former number of each tensor."""
        period = self.period

        def later(t: Lifetime) -> Lifetime:
            begin, end = (t.begin - moment) % period, (t.end - moment) % period
            return t._replace(begin=begin, end=end or period)

        pairs = sorted(((later(t), n) for n, t in enumerate(self.tensors)), key=lambda pair: (pair[0].begin, pair[1]))
        numbers = [n for _, n in pairs]
        dynamic = frozenset(new for new, old in enumerate(numbers) if old in self.dynamic)
        phases = tuple(sorted((p - moment) % period for p in self.phases))
        return replace(self, tensors=tuple(t for t, _ in pairs), phases=phases, dynamic=dynamic), numbers

    def length(self, number: int) -> int:
        """Moments during which a tensor is alive."""
        return sum(end - begin for begin, end in self.tensors[number].spans(self.period))

    def is_permanent(self, number: int) -> bool:
        """Is it alive at every moment of every step?"""
        return self.length(number) == self.period

    def is_alive(self, number: int, moment: int) -> bool:
        return any(begin <= moment < end for begin, end in self.tensors[number].spans(self.period))

    def events(self, steps: int) -> Iterator[list[Event]]:
        """What is asked of an allocator: the tensors that are there at first, then every step.

        Between two steps, what only the first of them had is freed, and what the next begins with is allocated.
        """
        at_first = [n for n in range(len(self.tensors)) if self.is_alive(n, 0)]
        there = set(at_first)
        found = [(t.begin, 1, n) for n, t in enumerate(self.tensors) if n not in there or t.wraps()]
        found += [(t.end, 0, n) for n, t in enumerate(self.tensors) if 0 < t.end < self.period]
        body = [Event(n, not is_begin) for _, is_begin, n in sorted(found)]
        at_last = {n for n in range(len(self.tensors)) if self.is_alive(n, self.period - 1)}
        between = [Event(n, True) for n in sorted(at_last - there)] + [Event(n, False) for n in at_first if n not in at_last]
        yield [Event(n, False) for n in at_first]
        for _ in range(steps):
            yield [*body, *between]


def lifetimes_of(order: Sequence[tuple[int, Bytes]], there: int = 0, *, align: int = 1) -> StepLifetimes:
    """Pair allocations with frees, a size of -1. The first `there` entries are tensors present when a step begins.

    Those are alive from moment 0 on; the first allocation or free of the step is moment 1. What nothing frees stays to the end.
    """
    period = len(order) - there + 1
    begun: dict[int, tuple[int, Bytes]] = {}  # key -> number of its allocation, size
    found: list[tuple[int, Lifetime]] = []

    def end(key: int, moment: int) -> None:
        number, nbytes = begun.pop(key)
        found.append((number, Lifetime(key, max(number - there + 1, 0), moment, round_up(nbytes, align))))

    for number, (key, size) in enumerate(order):
        if size < 0:
            end(key, max(number - there + 1, 0))
        else:
            begun[key] = (number, size)
    for key in list(begun):
        end(key, period)
    return StepLifetimes(tuple(t for _, t in sorted(found) if t.size and t.begin < t.end), period, align)
