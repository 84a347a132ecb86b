"""Bytes that a kernel takes and gives back inside an op, measured on the GPU itself.

Nothing at the level of ops shows them, and some are large: attention's backward keeps fp32 sums, sorts and embedding
gradients keep whole copies. The few kinds of op that do this are run once alone, on empty tensors of the traced shapes, while
the allocator watches. Matrix products are left out: their workspace is taken once and stays (`Hardware.resident`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

_KINDS = (
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


class Workspaces:
    """Asks the GPU, each question once. Without a GPU, or on another device, the answer is 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" and torch.cuda.is_available() else None
        self._known: dict[Any, int] = {}

    def bytes_of(self, func: Any, args: Any, kwargs: Any) -> int:
        if self._device is None or not any(kind in str(func) for kind in _KINDS):
            return 0
        key = (str(func), tuple(_question(x) for x in tree_iter((args, kwargs))))
        if key not in self._known:
            try:
                self._known[key] = self._measure(func, args, kwargs)
            except (RuntimeError, torch.OutOfMemoryError, TypeError, ValueError):
                self._known[key] = 0  # it does not run on empty tensors, or not in what is free now
        return self._known[key]

    def _measure(self, func: Any, args: Any, kwargs: Any) -> int:
        assert self._device is not None
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng([self._device.index or 0]):

            def empty(t: torch.Tensor) -> torch.Tensor:
                # attention reads its random seed and offset, single integers, through host pointers
                device = "cpu" if t.dim() == 0 and not t.is_floating_point() else t.device
                made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
                return made.zero_() if not t.is_floating_point() else made.normal_()

            real_args, real_kwargs = tree_map_only(torch.Tensor, empty, (args, kwargs))
            func(*real_args, **real_kwargs)  # libraries take what they keep on the first call
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            out = func(*real_args, **real_kwargs)
            after = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            del out
        assert after >= before
        return peak - after


def _question(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)
