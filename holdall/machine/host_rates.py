"""Measures how fast a GPU's host updates parameters, and how updates and copies slow each other: they share its memory.

Caches would distort both. The last-level cache may hold hundreds of MiB, so updates and copies use more memory than that, as in
a run: with 300 MiB of cache, updates over 0.9 GB were a quarter faster than in a run, and copies over 64 MiB slowed them half
as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from threading import Event, Thread
from typing import NamedTuple

import psutil
import torch

from holdall.tiers.cpu import Cpu
from holdall.units import GiB, MiB
from holdall.updates import host_adam

_PATIENCE = 0.4  # seconds per measurement
_UPDATED = 1 << 26  # parameters per update
_WALKED = 4 * GiB  # bytes that the updates rotate through
_COPIED = 512 * MiB  # bytes that copies rotate through, each way
_PIECE = 32 * MiB


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """The host's rates for updates; fields of `Hardware`."""

    updates: float = 0.0
    updates_beside: float = 0.0
    read_beside: float = 1.0


def host_rates(device: torch.device) -> HostRates:
    """Measured anew at every call, since the rates of a shared host vary."""
    if device.type != "cuda":
        return HostRates()
    with torch.no_grad():
        sets = _make_sets()
        threads = host_adam.host_threads(device)
        alone = _updates(sets, threads)
        with closing(Cpu(device=device)) as store, _Traffic(store, into=True) as read, _Traffic(store, into=False):
            free = read.rate(partial(time.sleep, _PATIENCE))
            beside, left = read.during(partial(_updates, sets, threads))
    return HostRates(updates=alone, updates_beside=beside, read_beside=min(1.0, left / free))


class _Set(NamedTuple):
    """The tensors of one Adam update: low-precision gradient in, low-precision weight out, as in plans."""

    value: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    grad: torch.Tensor
    step: torch.Tensor

    def update(self, threads: int) -> None:
        host_adam.update(
            [self.value],
            [self.first],
            [self.second],
            [self.step],
            [self.grad],
            lr=1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.0,
            decoupled=True,
            scale=1.0,
            out=[self.grad],
            threads=threads,
        )


def _make_sets() -> list[_Set]:
    room = min(_WALKED, int(psutil.virtual_memory().available) // 4)
    count = min(_UPDATED, max(1 << 16, room // 14))
    sets = []
    for _ in range(max(1, room // (14 * count))):
        value, first, second = (torch.zeros(count) for _ in range(3))
        sets.append(_Set(value, first, second, torch.full((count,), 0.01, dtype=torch.bfloat16), torch.zeros(())))
    for each in sets:
        each.update(torch.get_num_threads())  # the first pass over new memory is slow
    return sets


def _updates(sets: Sequence[_Set], threads: int) -> float:
    """Parameters per second, averaged over all updates: a run waits for the slow ones too."""
    begun, walks = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < _PATIENCE:
        sets[walks % len(sets)].update(threads)
        walks += 1
    return walks * sets[0].value.numel() / spent


class _Traffic:
    """Continuous copies in one direction, in a separate thread."""

    def __init__(self, store: Cpu, *, into: bool) -> None:
        here = torch.zeros(_PIECE, dtype=torch.uint8, device=store.device)
        there = store.memory(store.reserve(max(_PIECE, min(_COPIED, int(psutil.virtual_memory().available) // 8))))
        self._copies = [(here, part) if into else (part, here) for part in there.split(_PIECE) if part.numel() == _PIECE]
        self._stream = torch.cuda.Stream(store.device)
        self._nbytes = 0
        self._is_over = Event()
        self._thread = Thread(target=self._copy, name="holdall-probe", daemon=True)

    def __enter__(self) -> _Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def rate(self, call: Callable[[], object]) -> float:
        """Bytes per second while `call` runs."""
        begun, before = time.perf_counter(), self._nbytes
        call()
        return (self._nbytes - before) / (time.perf_counter() - begun)

    def during(self, call: Callable[[], float]) -> tuple[float, float]:
        """(result of the call, bytes per second meanwhile)."""
        found: list[float] = []
        rate = self.rate(lambda: found.append(call()))
        return found[0], rate

    def _copy(self) -> None:
        under_way: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._stream):
            for target, source in cycle(self._copies):
                if self._is_over.is_set():
                    break
                target.copy_(source, non_blocking=True)
                under_way.append(self._stream.record_event())
                if len(under_way) > 2:  # keep the link busy
                    under_way.pop(0).synchronize()
                    self._nbytes += _PIECE
        self._stream.synchronize()
