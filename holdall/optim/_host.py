"""Adam and AdamW on host memory, for weights whose state lives there: low-precision gradient in, low-precision weight out.

Two back ends do the same arithmetic in the order of torch's fused CPU kernel:

    native  one pass over memory by `_host_adam.cpp`, compiled on first use, in threads of its own
    torch   `torch._fused_adamw_` on slices, the gradient cast into a small fp32 scratch; needs no compiler

The native one is taken when the system has a C++ compiler and when, at loading, it agrees with the other on random data. Which
products torch's kernel fuses with the sum behind them was decided by its compiler, so the ways are tried until the bits agree.
`backend` says which was taken and why, `is_exact` whether its bits are those of `torch.optim` with `fused=True`.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from holdall.optim import _host_library

SLICE = 1 << 21  # elements a call of the torch back end: its scratch, 8 MiB, stays in the cores' caches
TOLERANCE = 4  # ulps of a tensor's largest element by which the native back end may differ and still be taken
COMPILERS = ("c++", "g++", "clang++")
FUSIONS = (2, 3, 1, 0)  # the values of FUSE in the source, likeliest first
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # of the source; 0: none

log = logging.getLogger("holdall")
_lock = threading.Lock()
_chosen: _Backend | None = None
_scratch = threading.local()  # of the torch back end: one a calling thread


@dataclass(frozen=True, slots=True)
class Rule:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW; else the decay joins the gradient, as in Adam
    maximize: bool
    scale: float  # multiplies the gradient


class Arrays(NamedTuple):
    """What belongs to one tensor, each contiguous."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    grad: Tensor
    out: Tensor | None
    new: tuple[Tensor, Tensor, Tensor] | None = None  # where param, exp_avg, exp_avg_sq go; None: to their own places
    is_peek: bool = False  # they go nowhere: `out` alone is asked for


Step = Callable[[Sequence[Arrays], Rule, int], None]


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
    threads: int,
) -> None:
    """One step in place on lists of contiguous CPU tensors, without the GIL, in `threads` threads.

    `grads` are fp32, bf16 or fp16; they are multiplied by `scale` in fp32 where they are used, and stay as they are. `out` are
    bf16 or fp16 tensors that receive the new weights beside the fp32 ones. An element is read before it is written, so that
    `out` may be the very same memory as `grads` of the same dtype; any other overlap is an error that nobody notices.
    `steps` are counters as torch.optim keeps them, one a tensor; they are incremented here. `into`: tensors that receive the
    new weights and moments, while the old ones stay as they are. `peek`: nothing but `out` is written, not even `steps`; that
    takes little more than half of the time, and the same call without `peek` gives `out` the same bits once more.
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
    step = _choose().step
    if not peek:
        torch._foreach_add_(list(steps), 1)
    step(arrays, rule, threads)


def backend() -> str:
    """Which back end `update` takes, and why. Compiles it if nobody did so yet."""
    chosen = _choose()
    return f"{chosen.name}: {chosen.why}"


def is_exact() -> bool:
    """Whether `update` gave the bits of torch's fused Adam and AdamW in all of the test at loading, on this machine."""
    return _choose().is_exact


def warm(threads: int) -> None:
    """Do now what the first update would wait for: compiling and loading, and starting torch's threads in this thread."""
    arrays = _examples(torch.bfloat16, torch.bfloat16, [max(threads, 1) << 16])
    _choose().step(arrays, Rule(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False, 1.0), threads)


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


# ---- torch


def _step_torch(arrays: Sequence[Arrays], rule: Rule, threads: int) -> None:
    fused = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    arrays = [_in_new_place(a) for a in arrays]
    with _torch_threads(threads):
        for cut in _batches(arrays, SLICE):
            batch = [_copied(a) for a in cut]
            params = [a.param for a in batch]
            fused(
                params,
                _full_gradients(batch, rule.scale),
                [a.exp_avg for a in batch],
                [a.exp_avg_sq for a in batch],
                [],
                [a.step.view(()) for a in batch],
                amsgrad=False,
                lr=rule.lr,
                beta1=rule.beta1,
                beta2=rule.beta2,
                weight_decay=rule.weight_decay,
                eps=rule.eps,
                maximize=rule.maximize,
                grad_scale=None,
                found_inf=None,
            )
            outs = [a.out for a in batch if a.out is not None]
            if outs:
                torch._foreach_copy_(outs, params)


def _batches(arrays: Sequence[Arrays], most: int) -> Iterator[list[Arrays]]:
    """Runs of at most `most` elements. Cuts lie at multiples of 16 elements from a tensor's start, as torch's own between its
    threads do: elsewhere a run would reach the scalar end of a vector loop, which need not round as its body does."""
    batch: list[Arrays] = []
    free = most
    for a in arrays:
        begin, size = 0, a.param.numel()
        while begin < size:
            length = min(size - begin, free)
            if begin + length < size:
                length -= length % 16
            if length == 0:
                yield batch
                batch, free = [], most
                continue
            batch.append(_piece(a, slice(begin, begin + length)))
            begin += length
            free -= length
    if batch:
        yield batch


def _in_new_place(a: Arrays) -> Arrays:
    """The same with the old values where the new ones shall be."""
    if a.new is None:
        return a
    torch._foreach_copy_(list(a.new), [a.param, a.exp_avg, a.exp_avg_sq])
    return a._replace(param=a.new[0], exp_avg=a.new[1], exp_avg_sq=a.new[2], new=None)


def _copied(a: Arrays) -> Arrays:
    """The same on copies, if its own values shall stay."""
    if not a.is_peek:
        return a
    return a._replace(param=a.param.clone(), exp_avg=a.exp_avg.clone(), exp_avg_sq=a.exp_avg_sq.clone())


def _piece(a: Arrays, piece: slice) -> Arrays:
    param, exp_avg, exp_avg_sq, grad = (t.view(-1)[piece] for t in (a.param, a.exp_avg, a.exp_avg_sq, a.grad))
    out = None if a.out is None else a.out.view(-1)[piece]
    return a._replace(param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, out=out)


def _full_gradients(batch: Sequence[Arrays], scale: float) -> list[Tensor]:
    """The gradients in fp32 and scaled: themselves if they are so already, else in the scratch."""
    grads = [a.grad for a in batch]
    if scale == 1.0 and all(g.dtype == torch.float32 for g in grads):
        return grads
    room: Tensor | None = getattr(_scratch, "room", None)
    if room is None or room.numel() < SLICE:
        room = _scratch.room = torch.empty(SLICE, dtype=torch.float32, device="cpu")
    ends = list(itertools.accumulate(g.numel() for g in grads))
    full = [room[end - g.numel() : end] for g, end in zip(grads, ends, strict=True)]
    torch._foreach_copy_(full, grads)
    if scale != 1.0:
        room[: ends[-1]].mul_(scale)
    return full


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Torch's number of threads belongs to the calling thread, and is given back as it was."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- native


class _CArray(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in ("new_param", "new_exp_avg", "new_exp_avg_sq", "grad", "out")),
        ("size", ctypes.c_int64),
        ("step", ctypes.c_double),
        ("grad_kind", ctypes.c_int32),
        ("out_kind", ctypes.c_int32),
    )


class _CRule(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "scale")),
        ("decoupled", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
    )


def _bind(library: Path) -> Step:
    adam = ctypes.CDLL(str(library)).holdall_adam  # a CDLL's functions run without the GIL
    adam.argtypes = (ctypes.POINTER(_CArray), ctypes.c_int64, ctypes.POINTER(_CRule), ctypes.c_int32)

    def step(arrays: Sequence[Arrays], rule: Rule, threads: int) -> None:
        given = (_CArray * len(arrays))(*map(_c_array, arrays))
        r = rule
        constants = _CRule(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.scale, r.decoupled, r.maximize)
        adam(given, len(arrays), ctypes.byref(constants), threads)

    return step


def _c_array(a: Arrays) -> _CArray:
    out, kind = (None, 0) if a.out is None else (a.out.data_ptr(), KINDS[a.out.dtype])
    own = (a.param, a.exp_avg, a.exp_avg_sq)
    return _CArray(
        *(t.data_ptr() for t in own),
        *((None,) * 3 if a.is_peek else (t.data_ptr() for t in a.new or own)),
        a.grad.data_ptr(),
        out,
        a.param.numel(),
        a.step.item(),
        KINDS[a.grad.dtype],
        kind,
    )


# ---- choosing


def _choose() -> _Backend:
    global _chosen
    with _lock:
        if _chosen is None:
            _chosen = _load()
            log.debug("host update by %s: %s", _chosen.name, _chosen.why)
    return _chosen


def _load() -> _Backend:
    """The native back end with the fusion that agrees best with torch, or the torch back end with the reason."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return _by_torch(f"no C++ compiler is on the path (of {', '.join(COMPILERS)})")
    found: list[tuple[float, int, Step]] = []
    reasons = []
    for fusion in FUSIONS:
        try:
            step = _bind(_host_library.build(compiler, fusion))
            found.append((_distance(step), fusion, step))
        except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
            reasons.append(str(error))
            continue
        if found[-1][0] == 0:
            return _Backend("native", f"{compiler}; the same bits as torch's fused kernel", True, step)
    if not found:
        return _by_torch(f"the native one does not load: {reasons[0]}")
    ulps, fusion, step = min(found, key=lambda f: f[0])
    if ulps > TOLERANCE:
        return _by_torch(f"the native one is {ulps:.3g} ulps off in its test, {TOLERANCE} are allowed")
    far = f"at most {math.ceil(ulps)} ulps of a tensor's largest element from torch's fused kernel (fusion {fusion})"
    return _Backend("native", f"{compiler}; {far}", False, step)


def _by_torch(why: str) -> _Backend:
    return _Backend("torch", why, True, _step_torch)


def _distance(step: Step) -> float:
    """The largest difference of a back end from torch's on random data, in ulps of the largest element of a tensor; 0: none."""
    rules = [
        Rule(lr, beta1, 0.95, 1e-8, decay, decoupled, maximize, scale)
        for (lr, beta1, maximize, scale) in ((1e-2, 0.9, False, 0.3), (3e-4, 0.4, True, 1.0))
        for decay in (0.1, 0.0)
        for decoupled in (True, False)
    ]
    far = 0.0
    for rule, grad, out in itertools.product(rules, KINDS, (None, torch.bfloat16, torch.float16)):
        ours, theirs = _examples(grad, out, [1039, 3]), _examples(grad, out, [1039, 3])
        step(ours, rule, 2)
        _step_torch(theirs, rule, 1)
        far = max(far, *(_ulps(x, y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a[:6], b[:6], strict=True)))
    return far


def _ulps(x: Tensor | None, y: Tensor | None) -> float:
    if x is None or y is None or torch.equal(x, y):
        return 0.0
    gap = (x.double() - y.double()).abs().max().item()
    about = torch.finfo(y.dtype)
    ulp = 2.0 ** math.floor(math.log2(max(y.abs().max().item(), about.tiny))) * about.eps
    return math.inf if math.isnan(gap) else gap / ulp


def _examples(grad: torch.dtype, out: torch.dtype | None, sizes: Sequence[int]) -> list[Arrays]:
    """Always the same values, whatever torch's random state and defaults are."""
    dice = torch.Generator("cpu").manual_seed(0)

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=dice, dtype=torch.float32, device="cpu")

    return [
        Arrays(
            draw(size),
            draw(size) * 0.1,
            draw(size).square() * 0.01,
            torch.tensor(3.0, dtype=torch.float32, device="cpu"),
            draw(size).to(grad),
            None if out is None else torch.zeros(size, dtype=out, device="cpu"),
        )
        for size in sizes
    ]
