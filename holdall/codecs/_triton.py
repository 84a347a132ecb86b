"""The group codec as one kernel each way, for GPUs. Without Triton the plain torch ops of `group.py` give the same result."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from holdall.codecs._base import GROUP, fields_of

_ROWS = 8  # groups per program


@cache
def _kernels() -> Any:
    try:
        from holdall.codecs import _kernels as kernels
    except ImportError:
        return None
    return kernels


def works_on(device: torch.device) -> bool:
    return device.type == "cuda" and _kernels() is not None


def encode(
    flat: torch.Tensor, codes: torch.Tensor, lows: torch.Tensor, steps: torch.Tensor, bits: int, seed: int | None
) -> None:
    """Fill the buffer; `seed` None: round to the nearest level."""
    groups = lows.numel()
    _kernels().encode_groups[(-(-groups // _ROWS),)](
        flat,
        codes,
        lows,
        steps,
        flat.numel(),
        groups,
        seed=seed or 0,
        BITS=bits,
        RANDOM=seed is not None,
        ROWS=_ROWS,
        SIZE=GROUP,
        **_fields(bits, groups),
    )


def decode(codes: torch.Tensor, lows: torch.Tensor, steps: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    groups = lows.numel()
    _kernels().decode_groups[(-(-groups // _ROWS),)](
        codes, lows, steps, out, out.numel(), groups, BITS=bits, ROWS=_ROWS, SIZE=GROUP, **_fields(bits, groups)
    )


def _fields(bits: int, groups: int) -> dict[str, int]:
    """Offsets of the 2-bit and 1-bit fields, and the bits of a code that each field holds (-1: no such field)."""
    lows = {width: low for low, width in fields_of(bits)}
    base2 = 128 * groups if 4 in lows else 0
    found = {"base2": base2, "base1": base2 + (64 * groups if 2 in lows else 0)}
    return found | {f"LOW{width}": lows.get(width, -1) for width in (4, 2, 1)}
