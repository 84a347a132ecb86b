"""Products of 8-bit floats by the GPU's own kernel (`torch._scaled_mm`), where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from holdall.narrow.casts import largest, narrow8
from holdall.narrow.formats import Float8, Format, Parts

MULTIPLE = 16  # of all sizes, as the kernel wants
_HOPPER = (8, 9)
_FOR_GPU: ContextVar[bool] = ContextVar("_FOR_GPU", default=False)


@contextmanager
def traced_for(device: str | torch.device | None) -> Iterator[None]:
    """While a step is traced for a GPU on a machine without one: products are those of a GPU that has the kernel."""
    is_there = device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available()
    before = _FOR_GPU.set(is_there)
    try:
        yield
    finally:
        _FOR_GPU.reset(before)


def can_scale(left: torch.Tensor, right: torch.Tensor, of_left: Format | None, of_right: Format | None) -> bool:
    """Is left (rows, inner) times right (columns, inner) transposed a product for the kernel?"""
    if not (isinstance(of_left, Float8) and isinstance(of_right, Float8)) or not (left.is_cuda or _FOR_GPU.get()):
        return False
    if of_left.rows != of_right.rows or (left.dtype == torch.float32 and of_left.rows):
        return False
    sizes = (*left.shape, *right.shape)
    return not any(s % MULTIPLE for s in sizes) and _has_kernel(left.device.index or 0)


@cache
def _has_kernel(index: int) -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(index) >= _HOPPER


def parts_of(form: Float8, values: torch.Tensor) -> Parts:
    """What `form.narrow` makes of a matrix, in two passes; its rows are what is summed over."""
    most = largest(values, rows=form.rows)
    codes, _, unit = narrow8(values, most, form.dtype, rows=form.rows, powers=form.powers)
    return codes, unit


def scaled_product(
    left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], dtype: torch.dtype, *, fast: bool = False
) -> torch.Tensor:
    """left times right transposed; both as codes with the units of the tensor, or of each row.

    `fast`: sums have 14 bits for a while, as Transformer Engine and torchao have them in forward, and in forward alone.
    """
    unit_left = left[1].reshape(-1, 1) if left[1].dim() else left[1].reshape(1)
    unit_right = right[1].reshape(1, -1) if right[1].dim() else right[1].reshape(1)
    made: torch.Tensor = torch._scaled_mm(
        left[0], right[0].t(), scale_a=unit_left, scale_b=unit_right, out_dtype=dtype, use_fast_accum=fast
    )
    return made
