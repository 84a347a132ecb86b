"""Measures ops on the GPU: seconds, and bytes that a kernel allocates and frees.

These hidden bytes do not appear at op level, and some are large: attention's backward keeps fp32 sums, sorts and embedding
gradients keep whole copies, the backward of a layer norm over many rows keeps partial sums. Nor does a table of rates know the
time of a copy between two layouts. So every kind of op of a step runs a few times alone, on tensors of the traced shapes, under
a clock and the allocator's counters; a step has a few hundred kinds, since its layers repeat. The workspace of matrix products
is left out: it is allocated once and stays (`Hardware.resident`).

`op_inputs.py` chooses the values; `step_mixture.py` measures how much slower products are in a whole step than alone.

Results are cached on disk. A cached op is still run once: its kernel is then loaded before the first step, and the memory of
kernels is known before a plan is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from holdall.caching import key_of, open_cache
from holdall.pace import pace_of
from holdall.tracing.timing import step_mixture
from holdall.tracing.timing.op_inputs import describe, make_inputs
from holdall.units import GiB, MiB

_HIDING = (  # measured however small: their time and memory do not follow from their inputs
    "attention",
    "softmax",
    "embedding_dense_backward",
    "convolution",
    "sort",
    "topk",
    "index_put",
    "_grouped_mm",
    "rnn",
    "scatter",
    "cumsum",
    "logsumexp",
)
_PRODUCTS = ("mm.", "mm_", "matmul", "linear")  # includes addmm, bmm, baddbmm
_BOUND = (*_PRODUCTS, "attention", "convolution")  # limited by arithmetic
_SMALL = MiB  # an op on less than this takes the time of a launch, which hides behind earlier ops
_LARGE = 8 * GiB  # most bytes of tensors made to measure an op
_CACHED = 2 * GiB  # most bytes that the allocator may keep between two ops
_FLOOR = 3e-6  # seconds of a kernel that does almost nothing
_RUNS = 3
_CYCLES = 500_000  # a quarter of a millisecond


class Trial(NamedTuple):
    workspace: int
    seconds: float  # 0: not measured


_UNKNOWN = Trial(0, 0.0)


def is_bound(op: str) -> bool:
    """Is the time of an op limited by arithmetic rather than memory?"""
    return any(kind in op for kind in _BOUND)


class Trials:
    """Measures ops on the GPU, each once. Without a GPU, or for another device, nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" and torch.cuda.is_available() else None
        self._known: dict[Any, Trial] = {}
        self._counts: Counter[Any] = Counter()
        self._tried: dict[Any, step_mixture.MixturePart] = {}
        self._kept: dict[str, list[float]] | None = None  # by op and arguments, from disk
        self._is_new = False  # there are results that are not on disk

    @property
    def is_timed(self) -> bool:
        return self._device is not None

    def ask(self, func: Any, args: Any, kwargs: Any) -> Trial:
        if self._device is None or getattr(func, "namespace", "") == "c10d":  # collectives of fake groups do nothing
            return _UNKNOWN
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        size = sum(t.untyped_storage().nbytes() for t in tensors)
        if size < _SMALL and not any(kind in str(func) for kind in _HIDING):
            return Trial(0, _FLOOR)
        if size > _LARGE:
            return _UNKNOWN
        key = (str(func), tuple(_question(x) for x in tree_iter((args, kwargs))))
        self._counts[key] += 1
        if key not in self._known:
            self._known[key] = self._remember(key, func, describe(args, kwargs))
            _give_back(self._device)
        return self._known[key]

    def _remember(self, key: Any, func: Any, described: tuple[Any, Any]) -> Trial:
        """The result from disk, or a new one."""
        question, answers = key_of(repr(key)), self._answers()
        found = answers.get(question)
        known = Trial(int(found[0]), float(found[1])) if found is not None and len(found) == 2 else None
        trial = self._try(key, func, described, known)
        if known is None and trial is not _UNKNOWN:  # otherwise there may be enough memory next time
            self._keep(question, [trial.workspace, trial.seconds])
        return known if known is not None else trial

    def _answers(self) -> dict[str, list[float]]:
        if self._kept is None:
            self._kept = _read(_place(self._device))
        return self._kept

    def _keep(self, question: str, answer: list[float]) -> None:
        self._answers()[question] = answer
        self._is_new = True

    def close(self) -> None:
        """Write new results to disk."""
        if self._is_new and self._kept is not None and self._device is not None and not pace_of(self._device).is_busy:
            self._is_new = False
            place = _place(self._device)
            open_cache().put("ops", place, {**_read(place), **self._kept})  # another process may have written meanwhile

    def _try(self, key: Any, func: Any, described: tuple[Any, Any], known: Trial | None) -> Trial:
        for on_host in (True, False):  # some attention kernels read their random seed through a host pointer
            try:
                trial = self._measure(func, described, on_host, known)
                self._tried[key] = step_mixture.MixturePart(
                    func=func,
                    described=described,
                    seconds=trial.seconds,
                    times=1,
                    nbytes=step_mixture.nbytes_of(described),
                    is_bound=is_bound(str(func)),
                    on_host=on_host,
                )
                return trial
            except (RuntimeError, torch.OutOfMemoryError, TypeError, ValueError):
                continue
        return _UNKNOWN  # it fails on such tensors, or there is not enough memory now

    def _measure(self, func: Any, described: tuple[Any, Any], on_host: bool, known: Trial | None) -> Trial:
        assert self._device is not None
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng([self._device.index or 0]):
            args, kwargs = make_inputs(func, described, on_host=on_host)
            func(*args, **kwargs)  # libraries allocate their workspaces at the first call
            if known is not None:
                return known
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            out = func(*args, **kwargs)
            after = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            del out
            seconds = _seconds(partial(func, *args, **kwargs), _RUNS)
        assert after >= before
        is_product = any(kind in str(func) for kind in _PRODUCTS) and "_grouped_mm" not in str(func)
        return Trial(0 if is_product else peak - after, max(_FLOOR, seconds))

    def slowdown(self) -> float:
        """How much longer arithmetic-bound ops take in the step than alone."""
        if self._device is None or not self._tried:
            return 1.0
        parts = [part._replace(times=self._counts[key]) for key, part in self._tried.items()]
        question = key_of("slowdown", sorted((repr(key), self._counts[key], part.seconds) for key, part in self._tried.items()))
        found = self._answers().get(question)
        if found is not None:
            return float(found[0])
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng([self._device.index or 0]):
            try:
                slower = step_mixture.slowdown(parts, _seconds)
            except torch.OutOfMemoryError:
                return 1.0
        self._keep(question, [slower])
        return slower


def _give_back(device: torch.device) -> None:
    """Free what the allocator keeps after a large op: ops of many sizes would fill the device with it, beyond any budget."""
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > _CACHED:
        torch.cuda.empty_cache()


def _place(device: torch.device | None) -> str:
    """The cache key for this device: everything that decides which kernels run."""
    assert device is not None
    gpu = torch.cuda.get_device_properties(device)
    backends = torch.backends
    told: list[Any] = [torch.get_float32_matmul_precision(), backends.cudnn.benchmark, backends.cudnn.deterministic]
    told += [backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()]
    return key_of("ops", gpu.name, gpu.total_memory, torch.__version__, torch.version.cuda, pace_of(device).since, *told)


def _read(place: str) -> dict[str, list[float]]:
    found = open_cache().get("ops", place)
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, list) and v and all(isinstance(x, (int, float)) for x in v)}


def load_solvers(device: torch.device) -> None:
    """Load the linear-algebra solver library before a plan is made, so that its memory is counted.

    It takes a tenth of a GiB outside the allocator, and as much again for every concurrent thread; this thread leaves its part
    to the next.
    """
    if not torch.cuda.is_available():
        return

    def use() -> None:
        torch.linalg.svd(torch.eye(8, device=device))
        torch.cuda.synchronize(device)

    with _disable_current_modes():
        thread = Thread(target=use)
        thread.start()
        thread.join()


def _seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds per call, over `count` calls in a row."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _keep_busy()  # in a step the device lags behind the launching thread, so launch times are hidden
    begun.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000 / count


def _keep_busy() -> None:
    """Keep the device busy for a moment, so that the following launches queue up."""
    wait = getattr(torch.cuda, "_sleep", None)
    if wait is not None:
        wait(_CYCLES)


def _question(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)
