"""A step of 8-bit Adam as one op per parameter, for GPUs with Triton. Elsewhere the plain ops of `adam8bit.py` do the same.

A trace records one op per parameter, without temporaries, instead of hundreds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdall.codecs.levels import BLOCK
from holdall.optim._math.quantise import dynamic_table

_ROWS = 8  # blocks per program
_TABLES: dict[torch.device, Tensor] = {}


@cache
def _kernel() -> Any:
    try:
        from holdall.optim._math.kernels import adam8bit_step
    except ImportError:
        return None
    return adam8bit_step


def is_there() -> bool:
    """Can updates on this machine's GPU run as one kernel each?"""
    return torch.cuda.is_available() and _kernel() is not None


def works_on(value: Tensor, grad: Tensor) -> bool:
    """Does the kernel support this update: at most 32 bits, contiguous, on a GPU with Triton?"""
    narrow = all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in (value, grad))
    return value.device.type == "cuda" and narrow and value.is_contiguous() and _kernel() is not None


def adamw(value: Tensor, grad: Tensor, state: dict[str, Any], numbers: list[float]) -> None:
    """Update `value` and the coded moments of `state`. `numbers`: lr, betas, eps, weight decay and the number of the step."""
    moments = [state[key] for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")]
    _op(value, grad.contiguous(), *moments, _tables(value), numbers)


@torch.library.custom_op(
    "holdall::adam8bit", mutates_args=("value", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
)
def _op(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    tables: Tensor,
    numbers: list[float],
) -> None:
    lr, beta1, beta2, eps, decay, count = numbers
    blocks = -(-value.numel() // BLOCK)
    _kernel()[(-(-blocks // _ROWS),)](
        value,
        grad,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq,
        exp_avg_sq_scale,
        tables,
        value.numel(),
        keep=1 - lr * decay,
        first=1 - beta1,
        beta2=beta2,
        second=1 - beta2,
        eps=eps,
        root=(1 - beta2**count) ** 0.5,
        size=-lr / (1 - beta1**count),
        NEAR=1 - beta1 < 0.5,
        ROWS=_ROWS,
        SIZE=BLOCK,
    )


@_op.register_fake
def _(*_: Any) -> None:
    """The fake of the op: it writes in place and returns nothing."""


def _tables(like: Tensor) -> Tensor:
    """(4, 256): levels with signs and without, and the middles between them. Made once: making it synchronises with the
    device."""
    found = _TABLES.get(like.device)
    if found is None or type(like) is not type(found):
        levels = torch.tensor([dynamic_table(signed=signed) for signed in (True, False)], device=like.device)
        middles = torch.nn.functional.pad((levels[:, 1:] + levels[:, :-1]) / 2, (0, 1))
        found = torch.cat([levels, middles])
        if type(found) is Tensor:  # not a fake tensor of a trace
            _TABLES[like.device] = found
    return found
