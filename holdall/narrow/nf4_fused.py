"""The expansion of an NF4 weight as one op, for GPUs with Triton. Elsewhere the plain ops of `nf4.py` do the same.

A trace records one op without temporaries; one that is made for a GPU on a machine without has it too. Before its first use on
a device the kernel expands a few blocks, and is used if they are those of the plain ops.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from holdall.narrow.kernels import _FOR_GPU

log = logging.getLogger("holdall")

_ROWS = 16  # blocks per program
_BOOKS: dict[torch.device, Tensor] = {}


@cache
def _kernel() -> Any:
    try:
        from holdall.narrow._nf4_kernel import expand_blocks
    except ImportError:
        return None
    return expand_blocks


def works_on(packed: Tensor) -> bool:
    return _FOR_GPU.get() or (packed.device.type == "cuda" and _kernel() is not None and _is_right(packed.device.index or 0))


@cache
def _is_right(index: int) -> bool:
    """Does the kernel expand a sample as the plain ops do on a CPU, up to a last bit?"""
    from holdall.narrow.nf4 import NormalFloat4

    with torch.no_grad(), _disable_current_modes():
        values = torch.linspace(-1, 1, 70 * 300).reshape(70, 300).pow(3)
        try:
            for double in (True, False):
                form = NormalFloat4(double=double)
                packed = form.pack(values)
                made = expand(packed.to(f"cuda:{index}"), values.numel(), form.block, double, torch.float32).cpu()
                torch.testing.assert_close(made.view(values.shape), form.expand(packed, values.shape, torch.float32))
        except Exception as error:  # a compiler may raise anything
            log.warning("holdall: NF4 weights are expanded by plain ops, without the kernel: %s", error)
            return False
    return True


def expand(packed: Tensor, numel: int, block: int, double: bool, dtype: torch.dtype) -> Tensor:
    made: Tensor = _op(packed, numel, block, double, dtype)
    return made


@torch.library.custom_op("holdall::nf4_expand", mutates_args=())
def _op(packed: Tensor, numel: int, block: int, double: bool, dtype: torch.dtype) -> Tensor:
    from holdall.narrow.nf4 import GROUP, NormalFloat4, code_book

    form = NormalFloat4(block=block, double=double)
    start, floats, end = form.offsets(numel)
    blocks = form.blocks(numel)
    if packed.device not in _BOOKS:
        _BOOKS[packed.device] = torch.tensor(code_book(), device=packed.device)
    out = torch.empty(numel, dtype=dtype, device=packed.device)
    _kernel()[(-(-blocks // _ROWS),)](
        packed,
        packed[start:].view(torch.int8),
        packed[floats:end].view(torch.float32),
        _BOOKS[packed.device],
        out,
        numel,
        blocks,
        -(-blocks // GROUP),
        DOUBLE=double,
        GROUP=GROUP,
        ROWS=_ROWS,
        HALF=block // 2,
    )
    return out


@_op.register_fake
def _(packed: Tensor, numel: int, block: int, double: bool, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return packed.new_empty(numel, dtype=dtype)
