"""Bytes and seconds as people write and read them; the only place that converts."""

from __future__ import annotations

import math
import re

from holdall.errors import InvalidInput

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
PAGE = 12 * MiB  # of expandable segments, the least that PyTorch takes: what a tensor's last page leaves free is lost

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_LARGEST = 2**60  # an exbibyte: beyond it a size is a slip of the pen
_SMALLEST = 512  # a bare number below it was meant in another unit: GPUs have so many GB


def parse_bytes(text: str | int | float, *, total: int | None = None, what: str = "budget") -> int:
    """Bytes from 26843545600, "24GiB", "24GB" (decimal), or a fraction such as 0.9 or "90%" of `total`."""
    example = 'write it as "24GiB", "24GB", a whole number of bytes, or a fraction of the device such as 0.9'
    if isinstance(text, bool):
        raise InvalidInput(f"`{what}` is {text!r}, which is not a size", hint=example)
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)\s*([A-Za-z]*|%)\s*", text)
        if match is None:
            raise InvalidInput(f"`{what}` is {text!r}, which is not a size", hint=example)
        number, unit = float(match[1]), match[2].lower()
        if unit == "%":
            return _share(number / 100, text, total, what, example)
        if unit not in _UNITS:
            raise InvalidInput(f"`{what}` is {text!r}: unknown unit `{match[2]}`", hint=example)
        if not unit and "." in match[1]:
            return _share(number, text, total, what, example)
        size = number * _UNITS[unit]
    elif isinstance(text, float) and 0 < text <= 1:
        return _share(text, text, total, what, example)
    elif not isinstance(text, (int, float)):
        raise InvalidInput(f"`{what}` is {text!r}, which is not a size", hint=example)
    else:
        size = float(text)
    if math.isnan(size) or size <= 0:
        raise InvalidInput(f"`{what}` is {text!r}, but a size must be above zero", hint=example)
    if size < _SMALLEST and isinstance(text, str) and text.strip().isdigit():
        raise InvalidInput(f"`{what}` is {text!r}, which would be {int(size)} bytes", hint=f'did you mean "{int(size)}GiB"?')
    if size > _LARGEST:
        raise InvalidInput(f"`{what}` is {text!r}, more than an exbibyte", hint=example)
    return int(size)


def _share(number: float, text: str | float, total: int | None, what: str, example: str) -> int:
    if not 0 < number <= 1:
        raise InvalidInput(f"`{what}` is {text!r}, but a share is above 0 and at most 100%", hint=example)
    if total is None:
        raise InvalidInput(f"`{what}` is {text!r}, a share, but of what is not known here", hint=example)
    return int(number * total)


def format_bytes(size: float) -> str:
    """GiB with one decimal, as everywhere; smaller units below one GiB."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size >= GiB:
        return f"{sign}{size / GiB:.1f} GiB"
    if size >= MiB:
        return f"{sign}{size / MiB:.1f} MiB"
    if size >= KiB:
        return f"{sign}{size / KiB:.1f} KiB"
    return f"{sign}{int(size)} B"


def format_seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    if seconds == 0:
        return "0 ms"
    return f"{seconds * 1e6:.3g} us"


def format_rate(per_second: float, unit: str) -> str:
    """'747 TFLOP/s' from 7.47e14 and 'FLOP'."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= power:
            return f"{per_second / power:.3g} {prefix}{unit}/s"
    return f"{per_second:.3g} {unit}/s"
