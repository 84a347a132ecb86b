"""What ops take on the GPU, measured on the GPU itself: seconds, and bytes that a kernel takes and gives back.

Nothing at the level of ops shows hidden bytes, and some are large: attention's backward keeps fp32 sums, sorts and embedding
gradients keep whole copies, the backward of a layer norm over many rows keeps partial sums. And no table of rates knows what a
copy between two layouts takes. So every kind of op of a step is run a few times alone, on tensors of the traced shapes, while
clock and allocator watch; a step has a few hundred of them, and its layers repeat. The workspace of matrix products is left
out: it is taken once and stays (`Hardware.resident`).

A few runs of a product are faster than a step full of them, in which the device comes to the limit of its power and lowers its
clock. By how much is measured once, on products with a pass over memory between them as a step has it, and charged to whatever
is bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from holdall.units import GiB, MiB

_HIDING = (  # tried however small: what they take need not follow from what they are given
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
_PRODUCTS = ("mm.", "mm_", "matmul", "linear")  # addmm, bmm, baddbmm among them
_BOUND = (*_PRODUCTS, "attention", "convolution")  # by arithmetic
_SMALL = MiB  # an op on less than this takes the time of a launch, which hides behind the ops before it
_LARGE = 8 * GiB  # of tensors that are made to try an op
_FLOOR = 3e-6  # seconds of a kernel that does next to nothing
_RUNS = 3
_CYCLES = 500_000  # a quarter of a millisecond
_SIDE = 8192  # of the product that is run for long
_LONG = 0.6  # seconds after which a device has found the clock that it can hold


class Trial(NamedTuple):
    workspace: int
    seconds: float  # 0: not measured


_UNKNOWN = Trial(0, 0.0)


class Trials:
    """Asks the GPU, each question once. Without a GPU, or on another device, nothing is known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" and torch.cuda.is_available() else None
        self._known: dict[Any, Trial] = {}
        self._slowdown: float | None = None

    @property
    def is_timed(self) -> bool:
        return self._device is not None

    def ask(self, func: Any, args: Any, kwargs: Any) -> Trial:
        if self._device is None:
            return _UNKNOWN
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        size = sum(t.untyped_storage().nbytes() for t in tensors)
        if size < _SMALL and not any(kind in str(func) for kind in _HIDING):
            return Trial(0, _FLOOR)
        if size > _LARGE:
            return _UNKNOWN
        key = (str(func), tuple(_question(x) for x in tree_iter((args, kwargs))))
        if key not in self._known:
            self._known[key] = self._try(func, args, kwargs)
        return self._known[key]

    def _try(self, func: Any, args: Any, kwargs: Any) -> Trial:
        for on_host in (True, False):  # some attention kernels read their random seed through a host pointer, some do not
            try:
                return self._measure(func, args, kwargs, on_host)
            except (RuntimeError, torch.OutOfMemoryError, TypeError, ValueError):
                continue
        return _UNKNOWN  # it does not run on such tensors, or not in what is free now

    def _measure(self, func: Any, args: Any, kwargs: Any, on_host: bool) -> Trial:
        assert self._device is not None
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng([self._device.index or 0]):

            def filled(t: torch.Tensor) -> torch.Tensor:
                single = t.dim() == 0 and not t.is_floating_point()
                device = "cpu" if single and on_host else t.device
                made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
                return made.zero_() if not t.is_floating_point() else made.normal_()

            real_args, real_kwargs = tree_map_only(torch.Tensor, filled, (args, kwargs))
            func(*real_args, **real_kwargs)  # libraries take what they keep on the first call
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            out = func(*real_args, **real_kwargs)
            after = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            del out
            seconds = _seconds(partial(func, *real_args, **real_kwargs), _RUNS)
            if any(kind in str(func) for kind in _BOUND):
                seconds *= self._in_the_long_run()
        assert after >= before
        is_product = any(kind in str(func) for kind in _PRODUCTS) and "_grouped_mm" not in str(func)
        return Trial(0 if is_product else peak - after, max(_FLOOR, seconds))

    def _in_the_long_run(self) -> float:
        """How much longer a product takes among many than among few."""
        if self._slowdown is None:
            self._slowdown = 1.0
            with suppress(torch.OutOfMemoryError):
                self._slowdown = max(1.0, self._compare())
        return self._slowdown

    def _compare(self) -> float:
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        a, b = (torch.empty(_SIDE, _SIDE, dtype=dtype, device=self._device).normal_() for _ in range(2))
        product = partial(torch.mm, a, b)
        product()
        torch.cuda.synchronize(self._device)
        few = _seconds(product, _RUNS)
        passes = max(1, round(few / 2 / _seconds(a.clone, _RUNS)))  # a third of the time goes to memory

        def both() -> None:
            product()
            for _ in range(passes):
                a.clone()

        alone = _seconds(both, _RUNS)
        count = max(_RUNS, round(_LONG / alone))
        _seconds(both, count)
        return 1 + (_seconds(both, count // 2) - alone) / few  # clocks of arithmetic sink, those of memory do not


def load_solvers(device: torch.device) -> None:
    """Have the library loaded that takes matrices apart, before a plan is made, which counts what libraries take by then.

    It takes a tenth of a GiB outside of the allocator; as much again for every thread that uses it while others do, but this
    one leaves its part to the next.
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
    """Of one of so many calls in a row."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _keep_busy()  # in a step the device is behind the thread that launches, so what launching takes is not seen
    begun.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000 / count


def _keep_busy() -> None:
    """The device waits a little, so that the runs that follow stand in its queue when it comes to them."""
    wait = getattr(torch.cuda, "_sleep", None)
    if wait is not None:
        wait(_CYCLES)


def _question(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)
