"""Casts to 8-bit floats as ops of one pass each, so that a trace has them as a GPU runs them.

`largest` reads a matrix once; `narrow8` reads it once more and writes codes, as they lie or transposed too; `turn8` has a scale
already, and `held8` may have one from steps before. On a GPU with Triton each is a kernel (`cast_kernels.py`); elsewhere
torch's ops give the same bits. Kernels are for bfloat16, on Hopper and later: before, Triton casts by
way of float16, which rounds twice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1e-12  # of a largest value: a tensor of zeros has codes of zeros
_BM, _BN = 64, 128  # rows and columns of a tile
_PARTS = 1024  # programs that look for the largest value of a tensor
_HOPPER = (9, 0)
_IS_ON = True  # off: torch's ops on GPUs too


@cache
def _kernels() -> Any:
    try:
        from holdall.narrow import cast_kernels
    except ImportError:
        return None
    return cast_kernels


@cache
def _is_able(index: int) -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(index) >= _HOPPER


def work_on(values: Tensor) -> bool:
    """Are casts of this tensor kernels? Those of float32 matrices gave other bits than torch's ops on an H200."""
    is_right = values.is_cuda and values.dtype == torch.bfloat16
    return _IS_ON and is_right and _kernels() is not None and _is_able(values.device.index or 0)


def switch(*, on: bool) -> None:
    """Use kernels, or torch's ops on GPUs too; both give the same bits."""
    global _IS_ON
    _IS_ON = on


# the arithmetic, in torch's ops


def scale_for(largest: Tensor, dtype: torch.dtype, *, powers: bool) -> Tensor:
    """What values are multiplied by. `powers`: the power of two below."""
    scale = largest.float().clamp(min=SMALLEST).reciprocal() * torch.finfo(dtype).max
    if not powers:
        return scale
    power = (scale.view(torch.int32) & -8388608).view(torch.float32)  # without its fraction; NaN would be infinite
    return torch.where(scale.isnan(), scale, power)


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype, *, cut: bool) -> Tensor:
    """Codes. Numbers are multiplied in float32, whatever their own dtype, so that they are rounded once."""
    wide = values * (scale if scale.dim() else scale.reshape(1))  # a scale without a dimension would take their dtype
    if cut:
        most = torch.finfo(dtype).max
        wide = wide.clamp(-most, most)
    return wide.to(dtype)


# the ops

_LIBRARY = torch.library.Library("holdall", "FRAGMENT")
_LIBRARY.define("largest(Tensor x, bool rows) -> Tensor")
_LIBRARY.define("narrow8(Tensor x, Tensor largest, ScalarType dtype, bool rows, bool powers) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("narrow8_both(Tensor x, Tensor largest, ScalarType dtype, bool powers) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define("turn8(Tensor x, Tensor scale, ScalarType dtype) -> Tensor")
_HELD = "(Tensor x, Tensor largest, Tensor held, Tensor(a!) seen, ScalarType dtype, bool record)"
_LIBRARY.define(f"held8{_HELD} -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"held8_both{_HELD} -> (Tensor, Tensor, Tensor, Tensor)")

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def largest(x: Tensor, *, rows: bool = False) -> Tensor:
    """The largest size in each row, or in parts of the matrix, whose largest is the matrix's."""
    made: Tensor = torch.ops.holdall.largest(x, rows)
    return made


def narrow8(x: Tensor, most: Tensor, dtype: torch.dtype, *, rows: bool = False, powers: bool = False) -> Three:
    """Codes, scale and unit."""
    made: Three = torch.ops.holdall.narrow8(x, most, dtype, rows, powers)
    return made


def narrow8_both(x: Tensor, most: Tensor, dtype: torch.dtype, *, powers: bool = False) -> Four:
    """Codes, codes transposed, scale and unit."""
    made: Four = torch.ops.holdall.narrow8_both(x, most, dtype, powers)
    return made


def turn8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes transposed, with a scale that is there already."""
    made: Tensor = torch.ops.holdall.turn8(x, scale, dtype)
    return made


def held8(x: Tensor, most: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, *, record: bool) -> Three:
    """Codes, scale and unit with the scale `held`, if it is above zero and all of x is finite; else as `narrow8`.

    What is above the format's largest number becomes that. `record`: the largest value goes to `seen` if it is larger.
    """
    made: Three = torch.ops.holdall.held8(x, most, held, seen, dtype, record)
    return made


def held8_both(x: Tensor, most: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, *, record: bool) -> Four:
    """`held8` with a transposed copy."""
    made: Four = torch.ops.holdall.held8_both(x, most, held, seen, dtype, record)
    return made


def _tiles(x: Tensor) -> int:
    return -(-x.shape[0] // _BM) * -(-x.shape[1] // _BN)


def _empty_codes(x: Tensor, dtype: torch.dtype, *, turned: bool = False) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]) if turned else x.shape, dtype=dtype)


def _empty_parts(x: Tensor, *, rows: bool) -> Tensor:
    return x.new_empty(x.shape[0] if rows else max(1, min(_PARTS, _tiles(x))), dtype=torch.float32)


def _empty_scale(x: Tensor, *, rows: bool) -> Tensor:
    return x.new_empty((x.shape[0], 1) if rows else (), dtype=torch.float32)


# by torch's ops


def _largest_by_ops(x: Tensor, rows: bool) -> Tensor:
    if rows:
        found: Tensor = torch.linalg.vector_norm(x, float("inf"), -1)
        return found.float()
    return _spread(x, max(1, min(_PARTS, _tiles(x))))


def _spread(x: Tensor, count: int) -> Tensor:
    """The largest size in the first of so many numbers."""
    made = x.new_zeros(count, dtype=torch.float32)
    made[0] = torch.linalg.vector_norm(x, float("inf")) if x.numel() else 0.0
    return made


def _most_of(parts: Tensor, *, rows: bool) -> Tensor:
    return parts.reshape(-1, 1) if rows else parts.amax()


def _narrow8_by_ops(x: Tensor, parts: Tensor, dtype: torch.dtype, rows: bool, powers: bool) -> Three:
    scale = scale_for(_most_of(parts, rows=rows), dtype, powers=powers)
    return scaled(x, scale, dtype, cut=False).contiguous(), scale, scale.reciprocal()


def _narrow8_both_by_ops(x: Tensor, parts: Tensor, dtype: torch.dtype, powers: bool) -> Four:
    codes, scale, unit = _narrow8_by_ops(x, parts, dtype, False, powers)
    return codes, _turned(codes), scale, unit


def _turned(codes: Tensor) -> Tensor:
    made: Tensor = codes.t().clone(
        memory_format=torch.contiguous_format
    )  # a row or a column is contiguous, and would not be copied
    return made


def _turn8_by_ops(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _turned(scaled(x, scale, dtype, cut=True))


def _held8_by_ops(x: Tensor, parts: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, record: bool) -> Three:
    scale = choose_scale(_most_of(parts, rows=False), held, seen, dtype, record=record)
    return scaled(x, scale, dtype, cut=True).contiguous(), scale, scale.reciprocal()


def choose_scale(most: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, *, record: bool) -> Tensor:
    """The scale of `held8`, for a matrix with this largest value."""
    most = most.float()
    if record:
        seen.copy_(torch.where(most > seen, most, seen))
    return torch.where((held > 0) & (most < float("inf")), held, scale_for(most, dtype, powers=False))


def _held8_both_by_ops(x: Tensor, parts: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, record: bool) -> Four:
    codes, scale, unit = _held8_by_ops(x, parts, held, seen, dtype, record)
    return codes, _turned(codes), scale, unit


# by kernels


def _largest_by_kernel(x: Tensor, rows: bool) -> Tensor:
    if not work_on(x) or not x.numel():
        return _largest_by_ops(x, rows)
    parts = _empty_parts(x, rows=rows)
    sizes = (*x.shape, *x.stride())
    with torch.cuda.device(x.device):
        if rows:
            _kernels().largest_of_rows[(-(-x.shape[0] // 16),)](x, parts, *sizes, BM=16, BN=256, num_warps=4)
        else:
            _kernels().largest_of_parts[(parts.numel(),)](x, parts, *sizes, _tiles(x), BM=_BM, BN=_BN, num_warps=8)
    return parts


def _launch(x: Tensor, dtype: torch.dtype, *, codes: Tensor | None = None, turned: Tensor | None = None, **given: Any) -> None:
    """One pass. `given`: largest, scale, unit, held and seen, those that there are, and rows and powers."""
    some = codes if codes is not None else turned
    assert some is not None
    scale = given["scale"]
    parts = given.get("largest")
    held, seen = given.get("held"), given.get("seen")
    rows = bool(given.get("rows"))
    grid = (-(-x.shape[0] // _BM), -(-x.shape[1] // _BN))
    with torch.cuda.device(x.device):
        _kernels().cast_tiles[grid](
            x,
            scale if parts is None else parts,
            scale,
            given.get("unit", scale),
            some if codes is None else codes,
            some if turned is None else turned,
            scale if held is None else held,
            scale if seen is None else seen,
            *x.shape,
            *x.stride(),
            0 if parts is None else parts.numel(),
            torch.finfo(dtype).max,
            GIVEN=parts is None,
            ROWS=rows,
            POWERS=bool(given.get("powers")),
            STRAIGHT=codes is not None,
            TURNED=turned is not None,
            HELD=held is not None,
            RECORDED=seen is not None,
            PARTS=16 if parts is None or rows else max(16, 1 << (parts.numel() - 1).bit_length()),
            BM=_BM,
            BN=_BN,
            num_warps=8,
        )


def _narrow8_by_kernel(x: Tensor, parts: Tensor, dtype: torch.dtype, rows: bool, powers: bool) -> Three:
    if not work_on(x) or not x.numel():
        return _narrow8_by_ops(x, parts, dtype, rows, powers)
    codes, scale, unit = _narrow8_empty(x, parts, dtype, rows, powers)
    _launch(x, dtype, codes=codes, largest=parts, scale=scale, unit=unit, rows=rows, powers=powers)
    return codes, scale, unit


def _narrow8_both_by_kernel(x: Tensor, parts: Tensor, dtype: torch.dtype, powers: bool) -> Four:
    if not work_on(x) or not x.numel():
        return _narrow8_both_by_ops(x, parts, dtype, powers)
    codes, turned, scale, unit = _narrow8_both_empty(x, parts, dtype, powers)
    _launch(x, dtype, codes=codes, turned=turned, largest=parts, scale=scale, unit=unit, powers=powers)
    return codes, turned, scale, unit


def _turn8_by_kernel(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not work_on(x) or not x.numel():
        return _turn8_by_ops(x, scale, dtype)
    turned = _turn8_empty(x, scale, dtype)
    _launch(x, dtype, turned=turned, scale=scale)
    return turned


def _held8_by_kernel(x: Tensor, parts: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, record: bool) -> Three:
    if not work_on(x) or not x.numel():
        return _held8_by_ops(x, parts, held, seen, dtype, record)
    codes, scale, unit = _narrow8_empty(x, parts, dtype, False, False)
    _launch(x, dtype, codes=codes, largest=parts, scale=scale, unit=unit, held=held, seen=seen if record else None)
    return codes, scale, unit


def _held8_both_by_kernel(x: Tensor, parts: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, record: bool) -> Four:
    if not work_on(x) or not x.numel():
        return _held8_both_by_ops(x, parts, held, seen, dtype, record)
    codes, turned, scale, unit = _narrow8_both_empty(x, parts, dtype, False)
    given = {"largest": parts, "scale": scale, "unit": unit, "held": held, "seen": seen if record else None}
    _launch(x, dtype, codes=codes, turned=turned, **given)
    return codes, turned, scale, unit


# for traces: what they make


def _largest_empty(x: Tensor, rows: bool) -> Tensor:
    return _empty_parts(x, rows=rows)


def _narrow8_empty(x: Tensor, parts: Tensor, dtype: torch.dtype, rows: bool, powers: bool) -> Three:  # noqa: ARG001
    return _empty_codes(x, dtype), _empty_scale(x, rows=rows), _empty_scale(x, rows=rows)


def _narrow8_both_empty(x: Tensor, parts: Tensor, dtype: torch.dtype, powers: bool) -> Four:
    codes, scale, unit = _narrow8_empty(x, parts, dtype, False, powers)
    return codes, _empty_codes(x, dtype, turned=True), scale, unit


def _turn8_empty(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return _empty_codes(x, dtype, turned=True)


def _held8_empty(x: Tensor, parts: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, record: bool) -> Three:  # noqa: ARG001
    return _narrow8_empty(x, parts, dtype, False, False)


def _held8_both_empty(x: Tensor, parts: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, record: bool) -> Four:  # noqa: ARG001
    return _narrow8_both_empty(x, parts, dtype, False)


for _name in ("largest", "narrow8", "narrow8_both", "turn8", "held8", "held8_both"):
    _LIBRARY.impl(_name, globals()[f"_{_name}_by_ops"], "CPU")
    _LIBRARY.impl(_name, globals()[f"_{_name}_by_kernel"], "CUDA")
    torch.library.register_fake(f"holdall::{_name}", globals()[f"_{_name}_empty"], lib=_LIBRARY)
