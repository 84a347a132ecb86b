"""`host_adam.cpp` as a back end: one pass over memory, in its own threads, with the rounding of torch's fused kernel.

The compiler of torch's kernel decided which products are fused with the following sum: separately for whole vectors and for the
elements at a tensor's end, and differently between builds and vector widths (`ATEN_CPU_CAPABILITY`). So the variants are tried
on random data until the bits agree.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from holdall.updates import host_library
from holdall.updates.host_step import Arrays, Rule, Step, step_by_torch

FUSIONS = (3, 2, 1, 0, 4)  # the values of FUSE in the source, likeliest first
WIDTHS = (8, 16, 4)  # elements per vector
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # constants of the source; 0: none
_ALL = 1 << 62  # a width larger than any tensor: every element is in the tail
_WHOLE = (4096,)  # sizes without a tail, for every width
_Key = TypeVar("_Key")
_TAILED = (*range(1, 16), *range(64 + 1, 64 + 16, 2), 1024 + 15)  # every tail of every width


@dataclass(frozen=True, slots=True)
class Rounding:
    body: int  # fusion in whole vectors
    tail: int  # fusion in the tail
    width: int


@dataclass(frozen=True, slots=True)
class Native:
    step: Step
    rounding: Rounding
    ulps: float  # largest difference from torch's kernel in its test


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


class _CRounding(ctypes.Structure):
    _fields_ = (("tail", ctypes.c_int32), ("width", ctypes.c_int64))


def find(compiler: str) -> Native:
    """The back end whose bits agree with torch's, or the one with the smallest difference. At most two compilations.

    Elements of a tail are computed one by one, with any rounding, so one library shows which body is right.
    """
    library = host_library.build(compiler, FUSIONS[0])
    body = _best({fusion: bind(library, Rounding(FUSIONS[0], fusion, _ALL)) for fusion in FUSIONS}, _WHOLE)
    if body != FUSIONS[0]:
        library = host_library.build(compiler, body)
    plain = Rounding(body, body, WIDTHS[0])
    others = (Rounding(body, tail, width) for tail in FUSIONS if tail != body for width in WIDTHS)
    rounding = _best({r: bind(library, r) for r in (plain, *others)}, _TAILED)
    step = bind(library, rounding)
    return Native(step, rounding, distance(step))


def _best(steps: dict[_Key, Step], sizes: Sequence[int]) -> _Key:
    """The first that agrees with torch on fp32 gradients, otherwise the nearest one by one rule."""
    for key, step in steps.items():
        if all(_gap(step, rule, torch.float32, None, sizes) == 0 for rule in _rules()):
            return key
    return min(steps, key=lambda key: _gap(steps[key], next(_rules()), torch.float32, None, sizes))


def bind(library: Path, rounding: Rounding) -> Step:
    adam = ctypes.CDLL(str(library)).holdall_adam  # functions of a CDLL run without the GIL
    pointers = (ctypes.POINTER(_CArray), ctypes.c_int64, ctypes.POINTER(_CRule), ctypes.POINTER(_CRounding))
    adam.argtypes = (*pointers, ctypes.c_int32)
    rounded = _CRounding(rounding.tail, rounding.width)

    def step(arrays: Sequence[Arrays], rule: Rule, threads: int) -> None:
        given = (_CArray * len(arrays))(*map(_c_array, arrays))
        r = rule
        constants = _CRule(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.scale, r.decoupled, r.maximize)
        adam(given, len(arrays), ctypes.byref(constants), ctypes.byref(rounded), threads)

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


# ---- the test


def distance(step: Step) -> float:
    """The largest difference of a back end from torch's on random data, in ulps of a tensor's largest element; 0: none."""
    ways = itertools.product(_rules(), KINDS, (None, torch.bfloat16, torch.float16))
    return max(_gap(step, rule, grad, out, (1024 + 15, 64 + 7, 3)) for rule, grad, out in ways)


def _rules() -> Iterator[Rule]:
    for lr, beta1, maximize, scale in ((1e-2, 0.9, False, 0.3), (3e-4, 0.4, True, 1.0)):
        for decay in (0.1, 0.0):
            for decoupled in (True, False):
                yield Rule(lr, beta1, 0.95, 1e-8, decay, decoupled, maximize, scale)


def _gap(step: Step, rule: Rule, grad: torch.dtype, out: torch.dtype | None, sizes: Sequence[int]) -> float:
    ours, theirs = examples(grad, out, sizes), examples(grad, out, sizes)
    step(ours, rule, 2)
    step_by_torch(theirs, rule, 1)
    return max(_ulps(x, y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a[:6], b[:6], strict=True))


def _ulps(x: Tensor | None, y: Tensor | None) -> float:
    if x is None or y is None or torch.equal(x, y):
        return 0.0
    gap = (x.double() - y.double()).abs().max().item()
    about = torch.finfo(y.dtype)
    ulp = 2.0 ** math.floor(math.log2(max(y.abs().max().item(), about.tiny))) * about.eps
    return math.inf if math.isnan(gap) else gap / ulp


def examples(grad: torch.dtype, out: torch.dtype | None, sizes: Sequence[int]) -> list[Arrays]:
    """Fixed random values, whatever torch's random state and defaults are."""
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
