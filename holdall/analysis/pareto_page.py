"""The curve of budget against step time as one self-contained HTML page, in the style of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from holdall.analysis.pareto import Curve, Point
from holdall.analysis.smallest import needed
from holdall.reporting._page import PAGE, STYLE, percent
from holdall.units import GiB, KiB, MiB, format_bytes, format_seconds

_OWN = """
.curve { fill: none; stroke: var(--accent); stroke-width: 2; vector-effect: non-scaling-stroke; }
.point { position: absolute; width: 11px; height: 11px; margin: 0 0 -5.5px -5.5px; border-radius: 50%;
  background: var(--accent); border: 2px solid var(--card); }
.point.beaten { background: var(--keep); }
.point b { display: none; position: absolute; bottom: 14px; left: 50%; transform: translateX(-50%); width: max-content;
  padding: 4px 9px; font-weight: 400; font-size: 13px; background: var(--card); border: 1px solid var(--line);
  border-radius: 7px; box-shadow: 0 4px 16px rgb(0 0 0 / .16); z-index: 2; }
.point:hover b, .point:focus b { display: block; }
.point.right b { left: auto; right: -6px; transform: none; }
.chart { margin-top: 24px; }
.ticks .top { position: absolute; right: 10px; top: -22px; font-size: 12px; }
.pareto { border-left: 1px solid var(--soft); cursor: default; }
.done { white-space: normal; min-width: 220px; }
"""
_ROOM = 1.12  # length of the axes relative to the largest value


def pareto_page(curve: Curve, *, title: str, facts: Mapping[str, str]) -> str:
    """The page. `title` and `facts` are plain text; every figure is marked as predicted."""
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    header = (
        f'<header><p class="brand">holdall pareto</p><h1>{escape(title)}</h1>'
        f'<p class="verdict plain">predicted, not measured</p><dl class="facts">{listed}</dl></header>'
    )
    body = "\n".join([header, _chart(curve.points), _table(curve)])
    return PAGE.format(title=escape(title), style=STYLE + _OWN, body=body, script="")


def _chart(points: Sequence[Point]) -> str:
    unit, name = next(((u, n) for u, n in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if points[-1].budget >= u), (1, "B"))
    clock, tick = next(((1.0, "s"), (1e-3, "ms"))[k] for k in (0, 1) if k or max(p.seconds for p in points) >= 1)
    low, wide = _axis([p.budget / unit for p in points])
    high = max(p.seconds / clock for p in points) * _ROOM or 1.0
    at = [((p.budget / unit - low) / wide, p.seconds / clock / high) for p in points]
    line = " ".join(f"{100 * x:.2f},{100 * (1 - y):.2f}" for (x, y), p in zip(at, points, strict=True) if p.is_best)
    dots = "".join(_dot(p, x, y) for (x, y), p in zip(at, points, strict=True))
    rows = "".join(f'<span style="bottom:{percent(v / high)}">{_figure(v)}</span>' for v in _ticks(0.0, high))
    rules = "".join(f'<i class="rule" style="bottom:{percent(v / high)}"></i>' for v in _ticks(0.0, high)[1:])
    columns = "".join(f'<span style="left:{percent((v - low) / wide)}">{_figure(v)}</span>' for v in _ticks(low, low + wide, 8))
    return (
        '<section><h2>What memory costs in time <span class="soft">predicted</span></h2>'
        f'<p class="soft">time per step in {tick} against the budget in {name}; '
        "a grey point is no faster than one with less memory</p>"
        f'<div class="chart" role="img" aria-label="step time against budget"><div class="row">'
        f'<div class="gutter ticks">{rows}<small class="top">{tick}</small></div><div class="field memory pareto">{rules}'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline class="curve" points="{line}"/></svg>{dots}</div></div>'
        f'<div class="row axis"><div class="gutter">{name}</div><div class="times">{columns}</div></div></div>'
        "</section>"
    )


def _dot(point: Point, x: float, y: float) -> str:
    said = f"{format_bytes(point.budget)}: {format_seconds(point.seconds)}"
    style = "point" + ("" if point.is_best else " beaten") + (" right" if x > 2 / 3 else "")
    return f'<span class="{style}" tabindex="0" style="left:{percent(x)};bottom:{percent(y)}"><b>{said}</b></span>'


def _table(curve: Curve) -> str:
    fastest = min(p.seconds for p in curve.points)
    rows = "".join(_row(p, fastest) for p in reversed(curve.points))
    rows += "".join(
        f'<tr><td class="num">{format_bytes(b)}</td><td class="soft" colspan="5">no plan was found</td></tr>'
        for b in reversed(curve.refused)
    )
    heads = ("#budget", "#peak", "#host", "#time per step", "#of the speed", "what is done")
    cells = "".join(f'<th class="num">{h[1:]}</th>' if h.startswith("#") else f"<th>{h}</th>" for h in heads)
    return (
        '<section><h2>Point by point</h2><div class="table"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _row(point: Point, fastest: float) -> str:
    peak = point.plan.predicted.peak
    host = format_bytes(sum(list(peak.values())[1:])) if len(peak) > 1 else ""
    speed = f"{fastest / point.seconds:.0%}" if point.seconds else ""
    return (
        f'<tr><td class="num">{format_bytes(point.budget)}</td><td class="num">{format_bytes(needed(point.plan))}</td>'
        f'<td class="num soft">{host}</td><td class="num">{format_seconds(point.seconds)}</td>'
        f'<td class="num">{speed}</td><td class="done">{escape(done(point))}</td></tr>'
    )


def done(point: Point) -> str:
    """The plan's actions in a few words."""
    return ", ".join(f"{n} x {name}" for name, n in sorted(point.plan.count().items())) or "nothing to do"


def _axis(values: Sequence[float]) -> tuple[float, float]:
    """(start, length) of an axis: from zero unless the values are close together."""
    least, most = min(values), max(values)
    low = 0.0 if least < most / 2 or least == most else least - (most - least) * 0.1
    return low, (most - low) * 1.04 or 1.0


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values between `low` and `high`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _figure(value: float) -> str:
    return f"{value:.6g}"
