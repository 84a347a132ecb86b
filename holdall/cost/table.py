"""Measured rates as curves: a few points per op family and dtype, interpolated on logarithmic axes.

Small ops reach a lower rate than large ones, smoothly over many powers of ten; between two measured sizes a straight line in
log(work), log(rate) is within a few percent. Outside the measured range the nearest point's rate is used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import exp, log

from holdall.types import Rate

Curve = tuple[tuple[float, float], ...]  # (log work, log rate), by work
Curves = Mapping[tuple[str, str], Curve]  # (family, dtype) -> curve


def merge_tables(*tables: Iterable[Rate]) -> tuple[Rate, ...]:
    """All points in one table, sorted; the later table wins for equal points."""
    found = {(p.family, p.dtype, p.work): p for table in tables for p in table}
    return tuple(found[key] for key in sorted(found))


def build_curves(table: Iterable[Rate]) -> dict[tuple[str, str], Curve]:
    """One curve per family and dtype, adjusted so that more work never takes less time, despite noise."""
    curves: dict[tuple[str, str], Curve] = {}
    for p in merge_tables(table):
        if p.work <= 0 or p.rate <= 0:
            continue
        curve = curves.get((p.family, p.dtype), ())
        x, y = log(p.work), log(p.rate)
        if curve:
            last_x, last_y = curve[-1]
            y = min(y, last_y + (x - last_x))  # slope 1: the same time for more work
        curves[p.family, p.dtype] = (*curve, (x, y))
    return curves


def rate_at(curve: Curve, work: float) -> float:
    """The rate for ops of this much work."""
    x = log(work) if work > 0 else float("-inf")
    at = bisect_left(curve, (x,))
    if at == 0:
        return exp(curve[0][1])
    if at == len(curve):
        return exp(curve[-1][1])
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
