"""Measures a rank's device in its steps and its optimizer's, and ends those that pass the budget."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from holdall.pipelines.running.budget.saved import HeldBytes
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.budget.meter import CudaMeter
from holdall.sharded import local_of
from holdall.types.layout import allocated_bytes

if TYPE_CHECKING:
    from holdall.pipelines.running.pipe import PipeRun

STEP, UPDATE = "step", "update"
There = Callable[[], Iterable[torch.Tensor]]


class LedgerMeter:
    """For CPUs: counts what `there` lists, and what ops make, for as long as it lives."""

    def __init__(self, there: There, budget: int | None, held: HeldBytes) -> None:
        """`held`: what autograd holds, some of which comes without an op."""
        self._there, self._budget, self._held = there, budget, held
        self._ledger: Ledger | None = None
        self._is_on = False
        self.peaks: dict[str, int] = {}  # part -> the most bytes so far
        self.seconds: dict[str, list[float]] = {STEP: [], UPDATE: []}

    @contextmanager
    def measured(self, part: str, given: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """`given`: tensors of the user's that are there too."""
        if self._is_on:
            yield
            return
        seed = [*self._there(), *given]
        if self._ledger is None:
            self._ledger = Ledger(seed=seed, budget=self._budget)
        for t in seed:
            self._ledger.see(local_of(t).untyped_storage(), "there before")
        self._ledger.restart()
        began, self._is_on = time.perf_counter(), True
        try:
            self._held.ledger = self._ledger
            with self._ledger:
                yield
            self.seconds[part].append(time.perf_counter() - began)
        finally:
            self._is_on, self._held.ledger = False, None
            self.peaks[part] = max(self.peaks.get(part, 0), self._ledger.peak)


class AllocatorMeter:
    """For GPUs: reads the caching allocator, and limits it to the budget."""

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._meter = CudaMeter(device)
        self._meter.start(budget)
        self._parts: list[str] = []

    @contextmanager
    def measured(self, part: str, given: Iterable[torch.Tensor] = ()) -> Iterator[None]:  # noqa: ARG002
        self._meter.begin()
        yield
        self._meter.end()
        self._parts.append(part)

    @property
    def peaks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part, peak in zip(self._parts, self._meter.peaks(), strict=True):
            found[part] = max(found.get(part, 0), peak)
        return found

    @property
    def seconds(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {STEP: [], UPDATE: []}
        for part, seconds in zip(self._parts, self._meter.seconds(), strict=True):
            found[part].append(seconds)
        return found

    def stop(self) -> None:
        """The allocator is as before."""
        self._meter.stop()


Meter = LedgerMeter | AllocatorMeter


def bytes_besides(own: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of a GPU's tensors other than these: workspaces that libraries keep, and what else the user has there."""
    if device.type != "cuda":
        return 0
    gc.collect()
    storages = (local_of(t).untyped_storage() for t in own)
    sizes = {s._cdata: s.nbytes() for s in storages if s.device.type == device.type}.values()
    return max(0, torch.cuda.memory_allocated(device) - sum(allocated_bytes(nbytes, device.type) for nbytes in sizes))


def make_meter(device: torch.device, budget: int | None, run: PipeRun) -> Meter:
    if device.type != "cuda":
        assert run.saving is not None
        return LedgerMeter(run.there, budget, run.saving.held)
    meter = AllocatorMeter(device, budget)
    weakref.finalize(run, meter.stop)
    return meter


def measure_updates(optimizer: torch.optim.Optimizer, meter: Meter) -> None:
    """Count the steps of an optimizer too, with whatever hooks run in them."""
    plain: Any = optimizer.step

    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        with meter.measured(UPDATE):
            return plain(*args, **kwargs)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers want a method
