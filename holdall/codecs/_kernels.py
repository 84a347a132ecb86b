# ruff: noqa: N803, N806 (constants of a kernel are in capitals)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found"
"""Triton kernels of the group codec: a program takes ROWS groups, in registers. Layout and rounding are those of `group.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _put(codes, base, values, rows, groups, LOW: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Bits LOW to LOW + WIDTH of every code into their field, which begins at `base`."""
    PARTS: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = 32 * WIDTH
    part = tl.reshape((values >> LOW) & (2**WIDTH - 1), (ROWS, PARTS, BYTES))
    shifts = (tl.arange(0, PARTS) * WIDTH)[None, :, None]
    packed = tl.sum(part << shifts, axis=1)  # the bits do not overlap: the sum is their union
    at = base + rows[:, None].to(tl.int64) * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(codes + at, packed.to(tl.uint8), mask=(rows < groups)[:, None])


@triton.jit
def _get(
    codes,
    base,
    rows,
    groups,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The inverse of `_put`: the field's share of every code."""
    PARTS: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = 32 * WIDTH
    at = base + rows[:, None].to(tl.int64) * BYTES + tl.arange(0, BYTES)[None, :]
    packed = tl.load(codes + at, mask=(rows < groups)[:, None], other=0).to(tl.int32)
    shifts = (tl.arange(0, PARTS) * WIDTH)[None, :, None]
    part = (packed[:, None, :] >> shifts) & (2**WIDTH - 1)
    return tl.reshape(part, (ROWS, SIZE)) << LOW


@triton.jit
def encode_groups(
    flat,
    codes,
    lows,
    steps,
    numel,
    groups,
    base2,
    base1,
    seed,
    BITS: tl.constexpr,
    RANDOM: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    LOW4: tl.constexpr,
    LOW2: tl.constexpr,
    LOW1: tl.constexpr,
):
    OUT: tl.constexpr = 1.01 / 256
    LEVELS: tl.constexpr = 2**BITS - 1
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None].to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
    there = at < numel
    x = tl.load(flat + at, mask=there, other=0).to(tl.float32)
    low = tl.min(tl.where(there, x, float("inf")), axis=1)
    high = tl.max(tl.where(there, x, float("-inf")), axis=1)
    lost = tl.max(tl.where(there & (x != x), 1, 0), axis=1) > 0  # noqa: PLR0124
    low = tl.where(lost, float("nan"), low)  # reductions skip NaN, but NaN must decode to NaN
    stored = low.to(tl.bfloat16).to(tl.float32)
    low16 = tl.where(stored > low, low - tl.abs(low) * OUT, stored).to(tl.bfloat16)
    low = low16.to(tl.float32)
    step = (high - low) / LEVELS
    stored = step.to(tl.bfloat16).to(tl.float32)
    step16 = tl.where(stored < step, step * (1 + OUT), stored).to(tl.bfloat16)
    step = tl.maximum(step16.to(tl.float32), 1e-38)
    tl.store(lows + rows, low16, mask=rows < groups)
    tl.store(steps + rows, step16, mask=rows < groups)
    value = (x - low[:, None]) / step[:, None]
    if RANDOM:
        value += tl.rand(seed, at.to(tl.int32))
    else:
        value += 0.5
    code = tl.minimum(tl.maximum(tl.floor(value), 0.0), LEVELS * 1.0).to(tl.int32)
    if BITS == 8:
        tl.store(codes + at, code.to(tl.uint8), mask=(rows < groups)[:, None])
    else:
        if LOW4 >= 0:
            _put(codes, 0, code, rows, groups, LOW4, 4, ROWS)
        if LOW2 >= 0:
            _put(codes, base2, code, rows, groups, LOW2, 2, ROWS)
        if LOW1 >= 0:
            _put(codes, base1, code, rows, groups, LOW1, 1, ROWS)


@triton.jit
def decode_groups(
    codes,
    lows,
    steps,
    out,
    numel,
    groups,
    base2,
    base1,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    LOW4: tl.constexpr,
    LOW2: tl.constexpr,
    LOW1: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None].to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
    low = tl.load(lows + rows, mask=rows < groups, other=0).to(tl.float32)
    step = tl.load(steps + rows, mask=rows < groups, other=0).to(tl.float32)
    if BITS == 8:
        code = tl.load(codes + at, mask=(rows < groups)[:, None], other=0).to(tl.int32)
    else:
        code = tl.zeros((ROWS, SIZE), tl.int32)
        if LOW4 >= 0:
            code |= _get(codes, 0, rows, groups, LOW4, 4, ROWS, SIZE)
        if LOW2 >= 0:
            code |= _get(codes, base2, rows, groups, LOW2, 2, ROWS, SIZE)
        if LOW1 >= 0:
            code |= _get(codes, base1, rows, groups, LOW1, 1, ROWS, SIZE)
    value = code.to(tl.float32) * step[:, None] + low[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < numel)
