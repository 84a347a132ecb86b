"""Chaos: what is not promised is made to go wrong, so that whoever relies on it is found out.

Everything here is off unless somebody asks for it (`holdall.testing.chaos`, or `HOLDALL_DEBUG=chaos` or `chaos:7`, where 7 is
the seed). On, with the same promises as ever:

    delays       before every copy, and before every job of the thread that makes updates on the host
    poison       memory that is not valid yet, or not any more, is filled with NaN: buffers when they are taken and given back,
                 what a copy will write until it was waited for, weights from the step on until their update is there
    late copies  on a CPU, where copies are over at once, they are put off: until they are waited for, having read their source
                 when they were issued, or only then. Both may happen on a GPU
    order        of copies and updates that do not depend on each other is drawn

Results must be the same, bit for bit.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_CYCLES = 2_000_000  # of a GPU, for a millisecond or two


class Arrival:
    """Stands for a CUDA event where a CPU computes: whoever waits for it makes the copy."""

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._number = number

    def wait(self) -> None:
        self._line.reach(self._number)

    synchronize = wait

    def query(self) -> bool:
        return self._line.done >= self._number


class Line:
    """Stands for a stream of copies: they are made in the order in which they were issued."""

    def __init__(self) -> None:
        self.done = 0
        self._issued = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()

    def add(self, copy: Callable[[], None]) -> Arrival:
        with self._lock:
            self._issued += 1
            self._waiting.append(copy)
            return Arrival(self, self._issued)

    def reach(self, number: int) -> None:
        with self._lock:
            while self.done < number:
                self._waiting.popleft()()
                self.done += 1


class Chaos:
    """`longest`: seconds of a delay."""

    def __init__(self, seed: int = 0, *, longest: float = 0.004) -> None:
        self.seed = seed
        self.longest = longest
        self.delays = self.late = self.poisoned = 0  # how often, so that a test can tell that it was on
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _draw(self) -> float:
        with self._lock:
            return self._random.random()

    def pause(self, often: float = 0.7) -> None:
        """This thread goes on later, as a rule."""
        if self._draw() < often:
            self.delays += 1
            time.sleep(self._draw() * self.longest)

    def pause_stream(self) -> None:
        """What is issued next on the current CUDA stream begins later."""
        if self._draw() < 0.5:
            self.delays += 1
            torch.cuda._sleep(int(self._draw() * self.longest * 1000 * _CYCLES))

    def shuffled(self, items: Sequence[T]) -> list[T]:
        with self._lock:
            return self._random.sample(items, len(items))

    def poison(self, *tensors: torch.Tensor) -> None:
        """Fill with NaN, or in bytes with what is NaN in every floating dtype. No dispatch mode sees it."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for t in tensors:
                if t.dtype == torch.uint8:
                    t.detach().fill_(255)
                elif t.is_floating_point():
                    t.detach().fill_(float("nan"))
                self.poisoned += 1

    def copy(self, target: torch.Tensor, source: torch.Tensor, line: Line) -> Arrival:
        """A copy of bytes that is over when it was waited for."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            n = min(target.numel(), source.numel())
            target, source = target[:n], source[:n]
        how = self._draw()
        if how < 0.2:
            arrival = line.add(lambda: _copy(target, source))
            arrival.wait()
            return arrival
        self.late += 1
        if how < 0.6:  # read now, written later
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                source = source.clone()
        self.poison(target)
        return line.add(lambda: _copy(target, source))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        target.copy_(source)


def _asked(value: str) -> Chaos | None:
    """What `HOLDALL_DEBUG` says: words with commas between, of which `chaos` or `chaos:seed` is ours."""
    for word in value.split(","):
        name, _, seed = word.strip().partition(":")
        if name == "chaos":
            return Chaos(int(seed) if seed.strip().isdigit() else 0)
    return None


def asks_for(word: str) -> bool:
    """Whether `HOLDALL_DEBUG` has this word."""
    return word in (given.strip() for given in os.environ.get("HOLDALL_DEBUG", "").split(","))


_current: Chaos | None = _asked(os.environ.get("HOLDALL_DEBUG", ""))


def current() -> Chaos | None:
    """The one that is on; None, as ever: nothing is."""
    return _current


def switch(chaos: Chaos | None) -> Chaos | None:
    """Put another one on, or none; returns what was on before."""
    global _current
    before, _current = _current, chaos
    return before


def late_job(job: Callable[[], Any]) -> Callable[[], Any]:
    """The job, or the same begun later."""
    chaos = _current
    if chaos is None:
        return job

    def delayed() -> Any:
        chaos.pause()
        return job()

    return delayed
