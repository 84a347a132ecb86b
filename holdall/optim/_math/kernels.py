# ruff: noqa: N803, N806 (constants of a kernel are in capitals)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found"
"""The Triton kernel of 8-bit Adam: a program takes ROWS blocks of 256 elements, decodes, updates and encodes in registers.

The order of operations is that of `adam8bit.py`; a compiler may fuse a product with a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _level(unit, middles):
    """How many of the 255 rising `middles` lie below: the number of the nearest level."""
    at = tl.zeros(unit.shape, tl.int32)
    for n in tl.static_range(8):
        step = 128 >> n
        at += tl.where(tl.load(middles + at + step - 1) < unit, step, 0)
    return at


@triton.jit
def adam8bit_step(
    value,
    grad,
    m_codes,
    m_scales,
    v_codes,
    v_scales,
    tables,  # with signs, without; then the middles between the levels of both
    numel,
    keep,  # 1 - lr weight_decay
    first,  # 1 - beta1
    beta2,
    second,  # 1 - beta2
    eps,
    root,  # of 1 - beta2 ** step
    size,  # -lr / (1 - beta1 ** step)
    NEAR: tl.constexpr,  # first < 0.5, where torch's lerp changes its formula
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None].to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < numel
    there = rows.to(tl.int64) * SIZE < numel
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(value + at, mask=inside, other=0.0).to(tl.float32) * keep
    m = tl.load(tables + tl.load(m_codes + at, mask=inside, other=0).to(tl.int32))
    m = tl.where(inside, m * tl.load(m_scales + rows, mask=there, other=0.0)[:, None], 0.0)
    v = tl.load(tables + SIZE + tl.load(v_codes + at, mask=inside, other=0).to(tl.int32))
    v = tl.where(inside, v * tl.load(v_scales + rows, mask=there, other=0.0)[:, None], 0.0)

    m = m + first * (g - m) if NEAR else g - (g - m) * (1.0 - first)
    v = v * beta2 + second * g * g
    x = x + size * m / (tl.sqrt(v) / root + eps)
    tl.store(value + at, x.to(value.dtype.element_ty), mask=inside)

    TINY: tl.constexpr = 1.1754943508222875e-38
    sign = tl.where(-tl.min(m, axis=1) > tl.max(m, axis=1), -1.0, 1.0)
    scale = tl.max(tl.abs(m), axis=1)
    unit = m * sign[:, None] / tl.maximum(scale, TINY)[:, None]
    tl.store(m_codes + at, _level(unit, tables + 2 * SIZE).to(tl.uint8), mask=inside)
    tl.store(m_scales + rows, scale * sign, mask=there)

    scale = tl.max(tl.abs(v), axis=1)
    unit = v / tl.maximum(scale, TINY)[:, None]
    code = tl.where(unit > 0, tl.maximum(_level(unit, tables + 3 * SIZE), 1), 0)  # above zero stays above zero
    tl.store(v_codes + at, code.to(tl.uint8), mask=inside)
    tl.store(v_scales + rows, scale, mask=there)
