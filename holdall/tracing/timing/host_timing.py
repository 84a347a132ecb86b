"""Measures the time of an optimizer update on the host.

The time per element does not follow from bytes: torch's kernel may read memory once, a rule written in ops may stay in caches,
and quantised states are looked up one by one. So an elementwise rule runs on a sample. The probe measures fp32 Adam, for which
the engine has its own kernel.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdall.caching import key_of, open_cache
from holdall.optim._math.per_parameter import PerParameter
from holdall.updates.parts import ELEMENTWISE, Part, clone_optimizer, snapshot
from holdall.updates.stretches import made_for

_SAMPLE = 1 << 25  # elements: more than caches hold
_RUNS = 2


def seconds_per_element(optimizer: torch.optim.Optimizer, param: torch.Tensor, grad: torch.dtype) -> float | None:
    """Seconds per element of an update of such a parameter with a gradient of this dtype; None: a sample cannot tell, or the
    probe measures it.
    """
    if not _is_sampled(optimizer, param):
        return None
    numel = min(param.numel(), _SAMPLE)
    key = _key(optimizer, param, grad)
    kept = open_cache().get("ops", key)
    if isinstance(kept, float) and kept > 0:
        return kept
    with _disable_current_modes(), made_for("cpu"), torch.no_grad(), torch.random.fork_rng([]):
        sample = torch.nn.Parameter(torch.randn(numel, dtype=torch.float32, device="cpu").to(param.dtype))
        like = torch.randn(numel, dtype=torch.float32, device="cpu").to(grad)
        clone = clone_optimizer(optimizer, {id(param): sample}, foreach=False)
        part, groups = Part(clone, [sample]), snapshot(clone)
        state: dict[str, Any] = {}
        took = []
        for _ in range(1 + _RUNS):  # the first run creates the states
            began = time.perf_counter()
            part.update([sample.detach()], [like.clone()], [state], groups, [0])
            took.append(time.perf_counter() - began)
    found = min(took[1:]) / numel
    if numel == _SAMPLE:  # a small sample is quickly measured again
        open_cache().put("ops", key, found)
    return found


def _key(optimizer: torch.optim.Optimizer, param: torch.Tensor, grad: torch.dtype) -> str:
    options = {k: v for k, v in optimizer.defaults.items() if k not in ("lr", "weight_decay")}
    rule = (type(optimizer).__module__, type(optimizer).__qualname__, options, str(param.dtype), str(grad))
    threads = torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return key_of("host", rule, min(param.numel(), _SAMPLE), threads, platform.processor(), platform.node(), torch.__version__)


def _is_sampled(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> bool:
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and param.dtype == torch.float32:
        return False  # done by `updates/host_adam.py`
    return optimizer.is_by_element(param) if isinstance(optimizer, PerParameter) else type(optimizer) in ELEMENTWISE
