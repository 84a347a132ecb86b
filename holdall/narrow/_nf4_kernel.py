# ruff: noqa: N803 (constants of a kernel are in capitals)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found"
"""The Triton kernel that expands NF4 weights: a program takes ROWS blocks. Layout and arithmetic are those of `nf4.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand_blocks(
    codes,
    levels,
    numbers,
    book,
    out,
    numel,
    blocks,
    groups,
    DOUBLE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < blocks
    if DOUBLE:
        level = tl.load(levels + rows, mask=there, other=0).to(tl.float32)
        step = tl.load(numbers + rows // GROUP, mask=there, other=0)
        scale = tl.load(numbers + groups) + level * step
    else:
        scale = tl.load(numbers + rows, mask=there, other=0)
    at = rows[:, None].to(tl.int64) * HALF + tl.arange(0, HALF)[None, :]
    byte = tl.load(codes + at, mask=there[:, None], other=0).to(tl.int32)
    first = tl.load(book + (byte >> 4)) * scale[:, None]
    second = tl.load(book + (byte & 15)) * scale[:, None]
    both = tl.reshape(tl.join(first, second), (ROWS, 2 * HALF))
    to = rows[:, None].to(tl.int64) * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(out + to, both.to(out.dtype.element_ty), mask=to < numel)
