# ruff: noqa: N803, N806 (constants of a kernel are in capitals)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found"
"""Triton kernels of casts to 8-bit floats: the largest value in one pass, scaling and casting in another.

A matrix is read by tiles, whatever its strides. Sizes are compared as the integers that their bits are, sign cleared: for
numbers that is the same order, and NaN is above all. Rounding and the arithmetic of scales are those of `casts.py`, so division
is the exact one, and a cut is made of comparisons, which let NaN pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sizes(values):
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _tile(x, m, n, rows, columns, row_step, column_step):
    there = (m < rows)[:, None] & (n < columns)[None, :]
    at = m[:, None].to(tl.int64) * row_step + n[None, :].to(tl.int64) * column_step
    return tl.load(x + at, mask=there, other=0.0)


@triton.jit
def largest_of_parts(x, parts, rows, columns, row_step, column_step, tiles, BM: tl.constexpr, BN: tl.constexpr):
    """Each program has every so-many-th tile and gives one number."""
    across = tl.cdiv(columns, BN)
    most = tl.zeros((BM, BN), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m = (tile // across) * BM + tl.arange(0, BM)
        n = (tile % across) * BN + tl.arange(0, BN)
        most = tl.maximum(most, _sizes(_tile(x, m, n, rows, columns, row_step, column_step)))
    found = tl.max(tl.max(most, axis=1), axis=0)
    tl.store(parts + tl.program_id(0), found.to(tl.float32, bitcast=True))


@triton.jit
def largest_of_rows(x, largest, rows, columns, row_step, column_step, BM: tl.constexpr, BN: tl.constexpr):
    """Each program has BM rows."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    most = tl.zeros((BM, BN), tl.int32)
    for start in range(0, columns, BN):
        n = start + tl.arange(0, BN)
        most = tl.maximum(most, _sizes(_tile(x, m, n, rows, columns, row_step, column_step)))
    tl.store(largest + m, tl.max(most, axis=1).to(tl.float32, bitcast=True), mask=m < rows)


@triton.jit
def _scale_for(most, limit, POWERS: tl.constexpr):
    SMALLEST: tl.constexpr = 1e-12
    most = tl.where(most < SMALLEST, SMALLEST, most)
    scale = tl.div_rn(tl.full(most.shape, 1.0, tl.float32), most) * limit
    if POWERS:  # without its fraction a number is the power of two below; NaN would be infinite
        power = (scale.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, power, scale)  # noqa: PLR0124
    return scale


@triton.jit
def cast_tiles(
    x,
    largest,  # of every row, or of `parts` parts of the tensor; GIVEN: not read
    scales,  # written; GIVEN: read
    units,
    codes,
    turned,
    held,  # HELD: a scale from steps before, which is used if it is above zero and the tensor is finite
    seen,  # RECORDED: becomes the largest value if that is larger
    rows,
    columns,
    row_step,
    column_step,
    parts,
    limit,  # the format's largest number
    GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
    POWERS: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    HELD: tl.constexpr,
    RECORDED: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Codes as they lie and transposed, from one read."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    one = tl.arange(0, 1)
    if GIVEN:
        scale = tl.load(scales + one)
    elif ROWS:
        scale = _scale_for(tl.load(largest + m, mask=m < rows, other=0.0), limit, POWERS)
        mine = (m < rows) & (tl.program_id(1) == 0)
        tl.store(scales + m, scale, mask=mine)
        tl.store(units + m, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), mask=mine)
    else:
        part = tl.arange(0, PARTS)
        found = _sizes(tl.load(largest + part, mask=part < parts, other=0.0))
        most = tl.max(found, axis=0, keep_dims=True).to(tl.float32, bitcast=True)
        scale = _scale_for(most, limit, POWERS)
        mine = one + tl.program_id(0) + tl.program_id(1) == 0
        if HELD:
            before = tl.load(held + one)
            scale = tl.where((before > 0) & (most < float("inf")), before, scale)
        if RECORDED:  # by one program alone
            was = tl.load(seen + one, mask=mine, other=0.0)
            tl.store(seen + one, tl.where(most > was, most, was), mask=mine)
        tl.store(scales + one, scale, mask=mine)
        tl.store(units + one, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), mask=mine)
    value = _tile(x, m, n, rows, columns, row_step, column_step).to(tl.float32)
    value = value * scale[:, None]
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    code = value.to(codes.dtype.element_ty)
    if STRAIGHT:
        at = m[:, None].to(tl.int64) * columns + n[None, :]
        tl.store(codes + at, code, mask=(m < rows)[:, None] & (n < columns)[None, :])
    if TURNED:
        at = n[:, None].to(tl.int64) * rows + m[None, :]
        tl.store(turned + at, tl.trans(code), mask=(n < columns)[:, None] & (m < rows)[None, :])
