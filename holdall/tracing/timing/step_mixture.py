"""Measures how much longer the matrix products of a step take in the step than alone.

A few runs of one product are faster than a step full of them, in which the device reaches its power limit and lowers its clock.
By how much depends on the step: large products draw more power than small ones, attention or memory passes. So the ops that
dominate a step run for a while in the step's proportions, and the time beyond the sum of their single times is charged to the
arithmetic-bound ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.utils._pytree import tree_iter

from holdall.tracing.timing.op_inputs import InputLike, make_inputs
from holdall.units import GiB

ROUND = 0.05  # seconds of one round through the mixture
WARM = 0.6  # seconds until a device has settled on a clock rate
LOOK = 0.3  # seconds measured after that
_MOST = 24  # most kinds of ops in the mixture
_ROOM = 8 * GiB  # most bytes of their tensors
_BRIEF = 3e-5  # seconds; shorter ops take as long to launch as to run
_LEAST, _LARGEST = 0.9, 1.5  # plausible range of the factor
_FEW = 0.1  # share of the step's time; with less arithmetic than this the clock rate does not matter


class MixturePart(NamedTuple):
    """A kind of op in the step."""

    func: Any
    described: tuple[Any, Any]
    seconds: float  # alone
    times: int  # occurrences in the step
    nbytes: int
    is_bound: bool  # limited by arithmetic
    on_host: bool


def choose(parts: Sequence[MixturePart]) -> list[MixturePart]:
    """The parts that dominate the step's time, as many as fit in memory."""
    room = _ROOM
    chosen: list[MixturePart] = []
    for part in sorted(parts, key=lambda p: -p.seconds * p.times):
        if part.seconds >= _BRIEF and part.nbytes <= room and len(chosen) < _MOST:
            chosen.append(part)
            room -= part.nbytes
    return chosen


def interleave(counts: Sequence[int]) -> list[int]:
    """Each index as often as its count, evenly spread."""
    places = [((k + 0.5) / count, n) for n, count in enumerate(counts) for k in range(count)]
    return [n for _, n in sorted(places)]


def slowdown(parts: Sequence[MixturePart], time: Callable[[Callable[[], Any], int], float]) -> float:
    """The factor for arithmetic-bound ops. `time(call, count)`: seconds per call, over `count` calls in a row."""
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
    """Bytes of the tensors in a description."""
    likes = [x for x in tree_iter(described) if isinstance(x, InputLike)]
    return sum(x.elements * x.dtype.itemsize for x in likes)
