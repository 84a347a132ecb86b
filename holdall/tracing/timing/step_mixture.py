"""How much longer the products of a step take among all its ops than alone.

A few runs of one product are faster than a step full of them, in which the device comes to the limit of its power and lowers
its clock. By how much depends on the step: large products draw more power than small ones, attention or passes over memory. So
the ops that a step spends its time on are run for a while in the step's own proportions, and the time beyond the sum of their
single times is charged to those that are bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.utils._pytree import tree_iter

from holdall.tracing.timing.op_inputs import Like, make_inputs
from holdall.units import GiB

ROUND = 0.05  # seconds of one round through the mixture
WARM = 0.6  # seconds after which a device has found the clock that it can hold
LOOK = 0.3  # seconds that are measured then
_MOST = 24  # kinds of ops in the mixture
_ROOM = 8 * GiB  # of their tensors
_BRIEF = 3e-5  # seconds; shorter ops are launched no faster than they run
_LEAST, _LARGEST = 0.9, 1.5  # what is believed of a measurement
_FEW = 0.1  # of the step's time; with less arithmetic than that its clock does not matter


class Part(NamedTuple):
    """A kind of op in the step."""

    func: Any
    described: tuple[Any, Any]
    seconds: float  # alone
    times: int  # that it comes in the step
    nbytes: int
    is_bound: bool  # by arithmetic
    on_host: bool


def choose(parts: Sequence[Part]) -> list[Part]:
    """The parts on which the step spends its time, as many as there is room for."""
    room = _ROOM
    chosen: list[Part] = []
    for part in sorted(parts, key=lambda p: -p.seconds * p.times):
        if part.seconds >= _BRIEF and part.nbytes <= room and len(chosen) < _MOST:
            chosen.append(part)
            room -= part.nbytes
    return chosen


def interleave(counts: Sequence[int]) -> list[int]:
    """Each number as often as its count says, evenly spread."""
    places = [((k + 0.5) / count, n) for n, count in enumerate(counts) for k in range(count)]
    return [n for _, n in sorted(places)]


def slowdown(parts: Sequence[Part], time: Callable[[Callable[[], Any], int], float]) -> float:
    """The factor for ops bound by arithmetic. `time(call, count)`: seconds of one of so many calls in a row."""
    chosen = choose(parts)
    total = sum(p.seconds * p.times for p in chosen)
    if sum(p.seconds * p.times for p in chosen if p.is_bound) < _FEW * max(total, 1e-9):
        return 1.0
    counts = [max(1, round(p.times * ROUND / total)) for p in chosen]
    calls = []
    for part in chosen:
        args, kwargs = make_inputs(part.func, part.described, on_host=part.on_host)
        calls.append(partial(part.func, *args, **kwargs))
    order = [calls[n] for n in interleave(counts)]

    def one_round() -> None:
        for call in order:
            call()

    expected = sum(p.seconds * n for p, n in zip(chosen, counts, strict=True))
    bound = sum(p.seconds * n for p, n in zip(chosen, counts, strict=True) if p.is_bound)
    time(one_round, max(1, round(WARM / expected)))
    took = time(one_round, max(1, round(LOOK / expected)))
    return min(_LARGEST, max(_LEAST, 1 + (took - expected) / bound))


def nbytes_of(described: tuple[Any, Any]) -> int:
    """Bytes of the tensors that a description asks for."""
    likes = [x for x in tree_iter(described) if isinstance(x, Like)]
    return sum(x.elements * x.dtype.itemsize for x in likes)
