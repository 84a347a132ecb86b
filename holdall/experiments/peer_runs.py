"""Real steps under a peer: one loop for all peers, with the peak measured by the device's allocator."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdall.cli._errors import first_line
from holdall.errors import HoldallError, MissingExtra
from holdall.experiments.peers import LossOf, Subject, Variant
from holdall.runtime.budget.meter import CudaMeter
from holdall.runtime.head.lazy_logits import chunk_head


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Measured figures. `setup_seconds`: installation and the first step, which includes compiling and solving."""

    peak: int
    seconds: float
    setup_seconds: float
    losses: tuple[float, ...]


def run_peer(
    variant: Variant, subject: Subject, optimizer: torch.optim.Optimizer | None, batches: Iterable[Any], *, seed: int = 0
) -> Seen:
    """A user's training loop under a peer. Peak and seconds are those of the steps after the first.

    On a GPU the allocator measures the peak, as for plans. On a CPU one more step runs under a profiler of allocations; that
    includes kernels' workspaces of a few KiB, which the ledger of plans does not count.
    """
    gc.collect()
    torch.manual_seed(seed)
    undo = chunk_head(subject.model.get_submodule(subject.head[0]), rows=subject.head[1]) if subject.head else None
    try:
        measure = _on_gpu if next(subject.model.parameters()).is_cuda else _on_cpu
        began = time.perf_counter()
        with variant.install(subject) as loss_of:
            return measure(functools.partial(_step, subject.model, optimizer, loss_of), iter(batches), began)
    finally:
        if undo is not None:
            undo()
        gc.collect()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, loss_of: LossOf, batch: Any) -> torch.Tensor:
    loss = loss_of(batch)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def _on_gpu(step: functools.partial[torch.Tensor], batches: Iterator[Any], began: float) -> Seen:
    meter = CudaMeter(next(step.args[0].parameters()).device)
    meter.start(None)
    losses, setup = [], 0.0
    try:
        for batch in batches:
            meter.begin()
            losses.append(step(batch))
            meter.end()
            if not setup:
                torch.cuda.synchronize()
                setup = time.perf_counter() - began
        seconds, peaks = meter.seconds(), meter.peaks()
    finally:
        meter.stop()
    read = tuple(loss.item() for loss in losses)
    median = statistics.median(seconds[1:] or seconds)
    return Seen(peak=max(peaks[1:] or peaks), seconds=median, setup_seconds=setup, losses=read)


def _on_cpu(step: functools.partial[torch.Tensor], batches: Iterator[Any], began: float) -> Seen:
    losses, seconds = [], []
    setup = 0.0
    batch: Any = None
    for batch in batches:
        start = time.perf_counter()
        losses.append(step(batch).item())
        seconds.append(time.perf_counter() - start)
        setup = setup or time.perf_counter() - began
    model, optimizer = step.args[:2]
    gc.collect()
    there = [*model.parameters(), *model.buffers(), *(t for t in batch.values() if isinstance(t, torch.Tensor))]
    if optimizer is not None:
        there += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    before = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}
    peak = sum(before.values()) + allocated_on_top(lambda: step(batch))
    return Seen(peak=peak, seconds=statistics.median(seconds[1:] or seconds), setup_seconds=setup, losses=tuple(losses))


def allocated_on_top(work: Callable[[], object]) -> int:
    """The peak of bytes allocated on the CPU while `work` runs, above the level before it.

    Uses the older of torch's two profilers, which has the same events and writes nothing to the terminal.
    """
    profiler: Any = torch.autograd
    detail = torch._C._profiler._ExperimentalConfig()
    only_memory = profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, detail)
    profiler._enable_profiler_legacy(only_memory)
    try:
        work()
    finally:
        threads = profiler._disable_profiler_legacy()
    live = peak = 0
    for event in (e for events in threads for e in events if e.kind() == "memory_alloc"):
        live += event.cpu_memory_usage()
        peak = max(peak, live)
    return peak


def reason(error: BaseException) -> str:
    """Why a run failed, in one line."""
    if isinstance(error, HoldallError):
        return f"{error.fact} ({error.hint})" if isinstance(error, MissingExtra) else error.fact
    if isinstance(error, torch.OutOfMemoryError):
        return f"ran out of memory: {first_line(error)}"
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
