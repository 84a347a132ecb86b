"""Adam and AdamW on host memory, for weights whose state lives there: low-precision gradient in, low-precision weight out.

Two back ends do the same arithmetic in the order of torch's fused CPU kernel:

    native  one pass over memory by `host_adam.cpp`, compiled on first use (`host_native.py`)
    torch   torch's own fused kernel on slices (`host_step.py`); needs no compiler

The native one is chosen if the system has a C++ compiler and if it agrees with the other on random data when loaded. `backend`
says which was chosen and why, `is_exact` whether its bits equal `torch.optim` with `fused=True`. Callers that need these bits
pass `exact=True` to `update`, which then uses torch's kernel if the native one differs.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdall.updates import host_library, host_native
from holdall.updates.host_native import KINDS
from holdall.updates.host_step import Arrays, Rule, Step, step_by_torch

TOLERANCE = 4  # largest accepted difference of the native back end, in ulps of a tensor's largest element

log = logging.getLogger("holdall")
_lock = threading.Lock()
_chosen: _Backend | None = None


@dataclass(frozen=True, slots=True)
class _Backend:
    name: str
    why: str
    is_exact: bool
    step: Step


@torch.no_grad()
def update(
    params32: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    steps: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
    scale: float = 1.0,
    out: Sequence[Tensor] | None = None,
    into: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]] | None = None,
    peek: bool = False,
    exact: bool = False,
    threads: int,
) -> None:
    """One step in place on lists of contiguous CPU tensors, without the GIL, in `threads` threads.

    `grads` are fp32, bf16 or fp16; they are multiplied by `scale` in fp32 when used, and not changed. `out` are bf16 or fp16
    tensors that receive the new weights in addition to the fp32 ones. An element is read before it is written, so `out` may
    share memory exactly with `grads` of the same dtype; any other overlap gives wrong results without an error. `steps` are
    counters as in torch.optim, one per tensor; they are incremented here. `into`: tensors that receive the new weights and
    moments, leaving the old ones unchanged. `peek`: writes only `out`, not even `steps`; that takes little more than half the
    time, and the same call without `peek` gives `out` the same bits again. `exact`: the bits of torch's fused kernel, by that
    kernel itself if the chosen back end differs.
    """
    rule = Rule(float(lr), *betas, eps, weight_decay, decoupled, maximize, float(scale))
    arrays = _gather(params32, exp_avg, exp_avg_sq, steps, grads, out)
    if into is not None:
        arrays = [a._replace(new=new) for a, new in zip(arrays, zip(*into, strict=True), strict=True)]
    if peek:
        if out is None or into is not None:
            raise ValueError("`peek` writes `out` and nothing else: give `out`, and no `into`")
        arrays = [a._replace(is_peek=True, step=a.step + 1) for a in arrays]
    if threads < 1:
        raise ValueError(f"`threads` is {threads}; an update needs at least 1")
    if not arrays:
        return
    chosen = _choose()
    step = chosen.step if chosen.is_exact or not exact else step_by_torch
    if not peek:
        torch._foreach_add_(list(steps), 1)
    step(arrays, rule, threads)


def host_threads(device: torch.device) -> int:
    """Threads for updates of a model on this device: next to a GPU, all cores but the one that launches kernels.

    On an H200 with 16 cores, 12 and 15 threads gave the same step (0.94 s for a 3B model), and 8 threads a longer one (1.08 s).
    """
    if device.type == "cpu":
        return torch.get_num_threads()
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count - 1)


def backend() -> str:
    """The back end that `update` uses, and why. Compiles it if necessary."""
    chosen = _choose()
    return f"{chosen.name}: {chosen.why}"


def is_exact() -> bool:
    """Did `update` match the bits of torch's fused Adam and AdamW in the whole test at loading, on this machine?"""
    return _choose().is_exact


def _gather(
    params32: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    steps: Sequence[Tensor],
    grads: Sequence[Tensor],
    out: Sequence[Tensor] | None,
) -> list[Arrays]:
    lists = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "steps": steps, "grads": grads}
    if out is not None:
        lists["out"] = out
    for name, tensors in lists.items():
        if len(tensors) != len(params32):
            raise ValueError(f"`{name}` has {len(tensors)} tensors and `params32` {len(params32)}; give one for each")
    full = (torch.float32,)
    arrays = []
    for i, param in enumerate(params32):
        size = param.numel()
        arrays.append(
            Arrays(
                _checked(param, "params32", i, size, full),
                _checked(exp_avg[i], "exp_avg", i, size, full),
                _checked(exp_avg_sq[i], "exp_avg_sq", i, size, full),
                _checked(steps[i], "steps", i, 1, full),
                _checked(grads[i], "grads", i, size, tuple(KINDS)),
                None if out is None else _checked(out[i], "out", i, size, (torch.bfloat16, torch.float16)),
            )
        )
    return arrays


def _checked(tensor: Tensor, name: str, index: int, size: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    if tensor.dtype not in dtypes or not tensor.is_cpu or tensor.numel() != size or not tensor.is_contiguous():
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(
            f"`{name}[{index}]` is {tensor.dtype} of {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"give {wanted}, {size} elements, contiguous, on the CPU"
        )
    return tensor


# ---- choosing


def _choose() -> _Backend:
    global _chosen
    with _lock:
        if _chosen is None:
            _chosen = _load()
            log.debug("host update by %s: %s", _chosen.name, _chosen.why)
    return _chosen


def _load() -> _Backend:
    """The native back end with the rounding that agrees best with torch, or the torch back end with the reason."""
    compiler = host_library.find_compiler()
    if compiler is None:
        return _by_torch(f"no C++ compiler is on the path (of {', '.join(host_library.COMPILERS)})")
    try:
        found = host_native.find(compiler)
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
        return _by_torch(f"the native back end does not load: {error}")
    if found.ulps == 0:
        return _Backend("native", f"{compiler}; the same bits as torch's fused kernel", True, found.step)
    if not found.ulps <= TOLERANCE:
        return _by_torch(f"the native back end differs by {found.ulps:.3g} ulps in its test; {TOLERANCE} are allowed")
    far = f"at most {math.ceil(found.ulps)} ulps of a tensor's largest element from torch's fused kernel"
    return _Backend("native", f"{compiler}; {far} ({found.rounding})", False, found.step)


def _by_torch(why: str) -> _Backend:
    return _Backend("torch", why, True, step_by_torch)
