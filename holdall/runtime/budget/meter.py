"""Measures the peak of a step and enforces the budget: with the ledger on a CPU, with the caching allocator on a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from holdall.runtime.arena.step_arena import StepArena
from holdall.runtime.budget.gpu_processes import own_bytes
from holdall.runtime.budget.ledger import Ledger
from holdall.units import PAGE, MiB


class Meter(Protocol):
    ledger: Ledger | None
    arena: StepArena | None  # where the tensors of steps lie

    def start(self, budget: int | None) -> None: ...

    def begin(self) -> None: ...

    def forget_peak(self) -> None:
        """Measure the peak of this step from now on."""
        ...

    def end(self) -> None: ...

    def seconds(self) -> list[float]:
        """Seconds of every finished step."""
        ...

    def peaks(self) -> list[int]: ...

    def reserved(self) -> int | None: ...

    def curve(self) -> list[tuple[float, int]]: ...

    def stop(self) -> None: ...


class CpuMeter:
    """Counts storages; raises `OverBudget` at the op that exceeds the budget."""

    def __init__(self, there: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._there = there  # lists the tensors on the device when counting starts
        self.ledger: Ledger | None = None
        self.arena: StepArena | None = None
        self._seconds: list[float] = []
        self._peaks: list[int] = []
        self._curve: list[tuple[float, int]] = []
        self._began = 0.0

    def start(self, budget: int | None) -> None:
        self.ledger = Ledger(seed=self._there(), budget=budget)
        self.ledger.__enter__()

    def begin(self) -> None:
        assert self.ledger is not None
        self.ledger.restart()
        if self.arena is not None:
            self.arena.begin_step()
        self._began = time.perf_counter()

    def forget_peak(self) -> None:
        assert self.ledger is not None
        self.ledger.restart()

    def end(self) -> None:
        assert self.ledger is not None
        self._seconds.append(time.perf_counter() - self._began)
        if self.arena is not None:
            self.arena.end_step()
        self._peaks.append(self.ledger.peak)
        self._curve = [(at - self._began, live) for at, live in self.ledger.curve]

    def seconds(self) -> list[float]:
        return self._seconds

    def peaks(self) -> list[int]:
        return self._peaks

    def reserved(self) -> int | None:
        return None

    def curve(self) -> list[tuple[float, int]]:
        return self._curve

    def stop(self) -> None:
        if self.ledger is not None:
            self.ledger.__exit__(None, None, None)


_FIRST = 3  # steps after which no more kernels should be loaded
_USUAL_PAGE = 20 * MiB  # PyTorch's default
_SPARE = PAGE + 24 * MiB  # the last page counts by the bytes requested; the rest covers late allocations outside the allocator


def device_context(device: torch.device) -> int:
    """Bytes of a GPU in use outside the allocator: driver, kernels, and other processes if they cannot be told apart."""
    taken = own_bytes(device)
    if taken is None:
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free
    return max(0, taken - torch.cuda.memory_reserved(device))


def bytes_outside(device: torch.device) -> int:
    """Bytes of a budget that are not for tensors."""
    return device_context(device) + _SPARE if device.type == "cuda" else 0


class CudaMeter:
    """Reads the caching allocator, and limits it to the budget while the harness is on.

    The budget covers everything on the device, so the allocator's limit is the budget minus the memory outside it: the plan's
    estimate for driver and kernels, or more if more is measured. Kernels are loaded at first use, so the limit is adjusted in
    the first steps. Segments are expandable while the harness is on, so that free memory between tensors can be used. Steps are
    timed by events on the stream, without synchronising; work that a step leaves to the next is counted there.
    """

    ledger: Ledger | None = None

    def __init__(self, device: torch.device, context: int = 0) -> None:
        self._device = device
        self.arena: StepArena | None = None
        self._budget: int | None = None
        self._before: float | None = None
        self._expanded = False
        self._reserved = 0
        self._context = context
        self._peaks: list[int] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: list[float] = []
        self._began: torch.cuda.Event | None = None

    def start(self, budget: int | None) -> None:
        torch.cuda.empty_cache()
        self._context = max(self._context, device_context(self._device))
        self._expanded = _expandable_segments(True)
        self._budget = budget
        if budget is not None:
            self._before = torch.cuda.get_per_process_memory_fraction(self._device)
            self._limit(budget)

    def _limit(self, budget: int) -> None:
        total = torch.cuda.get_device_properties(self._device).total_memory
        share = max(0, budget - self._context - _SPARE) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._device)

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        if self.arena is not None:
            self.arena.begin_step()
        self._began = self._mark()

    def forget_peak(self) -> None:
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device) + self._context)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        assert self._began is not None
        self._events.append((self._began, self._mark()))
        if len(self._peaks) < _FIRST and (now := device_context(self._device)) > self._context:
            self._context = now
            if self._budget is not None:
                self._limit(self._budget)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device) + self._context)
        idle = 0  # bytes of the arena in which nothing lies at the peak
        if self.arena is not None:
            self.arena.end_step()
            idle = self.arena.idle
        self._peaks.append(torch.cuda.max_memory_allocated(self._device) - idle + self._context)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self) -> list[float]:
        for begun, ended in self._events:
            ended.synchronize()
            self._seconds.append(begun.elapsed_time(ended) / 1000)
        self._events = []
        return self._seconds

    def peaks(self) -> list[int]:
        return self._peaks

    def reserved(self) -> int | None:
        return self._reserved or None

    def curve(self) -> list[tuple[float, int]]:
        return []

    def stop(self) -> None:
        if self.arena is not None:  # nobody has closed the harness
            self.arena.close()
        if self._before is not None:
            torch.cuda.set_per_process_memory_fraction(self._before, self._device)
            self._before = None
        if self._expanded:
            _expandable_segments(False)
            self._expanded = False


def _expandable_segments(on: bool) -> bool:
    """Switch expandable segments; returns whether that changed anything. The user's other settings stay."""
    own = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments" in own:
        return False
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or getattr(torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None)
    if change is None:
        return False
    settings = f"expandable_segments:{on}"
    paged = f"{settings},large_segment_size_mb:{(PAGE if on else _USUAL_PAGE) // MiB}"
    for tried in (settings,) if "large_segment_size_mb" in own else (paged, settings):
        try:
            change(tried)
        except (RuntimeError, ValueError):
            continue  # no expandable segments on this platform, or a release with a fixed page size
        return True
    return False
