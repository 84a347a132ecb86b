"""A report as one page that needs nothing else: no server, no network, no script but its own.

The drawing is made here, as SVG that stretches with the window; its labels are HTML laid over it by percentages, so that they
keep their size on a narrow screen. The script only adds the cursor and its tooltip, and writes names as text, never as markup.

    peak label
    memory by kind, budget, measured total      one time axis
    compute / copy out / copy in / waiting      for all of it
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from holdall.reporting.text import KIND_LABELS, format_error
from holdall.types import Kind, Moment, Outcome, Phase, Span
from holdall.units import GiB, KiB, MiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from holdall.reporting.report import BlockRow, Report, Row

LIMIT = 1500  # points of one line and rectangles of one lane: beyond it a page grows heavy and shows no more
HOLDERS = 15
LANES = ("compute", "copy out", "copy in", "waiting")  # these first, in this order; others follow as they appear

_WIDE, _HIGH = 1000, 300  # units of the drawing; it is stretched to the window
_REST = "rest"  # bytes of a total that no kind accounts for

Series = dict[str, list[int]]  # class of the colour -> bytes at each moment, bottom of the stack first


def render_html(report: Report) -> str:
    """The whole page. Sections whose data is missing are left out, or say so where a reader would look for them."""
    title = escape(report.model or "training step")
    body = "\n".join(
        section
        for section in (
            _headline(report, title),
            _cards(report),
            _notes(report.notes),
            _timeline(report),
            _at_peak(report),
            _blocks(report.blocks),
            _reasons(report.plan.why),
            _environment(report),
        )
        if section
    )
    return _PAGE.format(title=title, style=_STYLE, body=body, script=_SCRIPT)


# --- the parts around the chart


def _headline(report: Report, title: str) -> str:
    plan = report.plan
    limits = " + ".join(f"{format_bytes(size)} {report.tier_label(tier)}" for tier, size in plan.budget.items())
    facts = [("planner", plan.planner), ("budget", limits or "none"), ("hardware", plan.hardware)]
    facts.append(("measured", f"{report.steps} step{'s' * (report.steps != 1)}" if report.measured else "not yet"))
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts if fact)
    level = {True: "good", False: "bad", None: "plain"}[report.fits]
    parity = f'<p class="parity"><b>loss, grads</b> {escape(report.parity)}</p>' if report.parity else ""
    return (
        f'<header><p class="brand">holdall report</p><h1>{title}</h1><p class="verdict {level}">{escape(report.verdict)}</p>'
        f'<dl class="facts">{listed}</dl>{parity}</header>'
    )


def _cards(report: Report) -> str:
    cards = [_card(row, ran=report.measured is not None) for row in report.rows()]
    if report.latest.traffic:
        moved = "".join(f"<p>{escape(link)} <b>{format_bytes(size)}</b></p>" for link, size in report.latest.traffic.items())
        cards.append(f'<div class="card"><h3>moved per step</h3>{moved}</div>')
    columns = math.ceil(len(cards) / math.ceil(len(cards) / 5))  # as few rows as five to a row allow, and those even
    return f'<section class="cards" style="--columns:{columns}" aria-label="predicted and measured">{"".join(cards)}</section>'


def _card(row: Row, *, ran: bool) -> str:
    chip, error = "", row.error
    if error is not None:
        chip = f'<span class="chip {"good" if abs(error) <= 0.05 else "plain"}">{format_error(error)}</span>'
    big, below = (row.seen, f"<p>predicted <b>{row.said}</b></p>") if ran else (row.said, "<p>predicted</p>")
    meter, best = "", row.measured if ran else row.predicted
    if row.limit and best is not None:
        mark = f'<i class="mark" style="left:{_percent(row.predicted / row.limit)}"></i>' if ran and row.predicted else ""
        state = " over" if best > row.limit else ""
        meter = f'<div class="meter{state}"><i style="width:{_percent(best / row.limit)}"></i>{mark}</div>'
        below += f"<p>budget <b>{format_bytes(row.limit)}</b></p>"
    return f'<div class="card"><h3>{escape(row.label)}{chip}</h3><p class="big">{big}</p>{meter}{below}</div>'


def _notes(notes: Sequence[str]) -> str:
    return f'<section class="notes"><ul>{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul></section>' if notes else ""


def _at_peak(report: Report) -> str:
    outcome = next((o for o in (report.predicted, report.measured) if o and (o.at_peak or o.peak_kinds)), None)
    if outcome is None:
        return ""
    total = sum(outcome.peak_kinds.values()) or outcome.peak.get(report.home, 0) or sum(h.nbytes for h in outcome.at_peak) or 1
    kinds = [(kind, outcome.peak_kinds.get(kind, 0)) for kind in KIND_LABELS]
    bar = "".join(f'<i class="k-{k.value}" style="width:{_percent(n / total)}"></i>' for k, n in kinds if n > 0)
    legend = "".join(_legend_item(f"k-{k.value}", f"{KIND_LABELS[k]} <b>{format_bytes(n)}</b>") for k, n in kinds if n > 0)
    most = max((h.nbytes for h in outcome.at_peak), default=0) or 1
    rows = "".join(
        f'<tr><td class="name"><code title="{escape(h.name)}">{escape(h.name)}</code></td>'
        f'<td><span class="swatch k-{h.kind.value}"></span>{KIND_LABELS[h.kind]}</td>'
        f'<td class="num">{format_bytes(h.nbytes)}</td><td class="num soft">{h.nbytes / total:.1%}</td>'
        f'<td class="share"><i class="k-{h.kind.value}" style="width:{_percent(h.nbytes / most)}"></i></td></tr>'
        for h in outcome.at_peak[:HOLDERS]
    )
    left = len(outcome.at_peak) - HOLDERS
    more = f'<p class="soft">and {left} smaller tensors</p>' if left > 0 else ""
    table = _table(("tensor", "kind", "#bytes", "#of the peak", ""), rows) + more if rows else ""
    where = f'<p class="soft">{escape(outcome.peak_where)}, {_voice(outcome)}</p>' if outcome.peak_where else ""
    stack = f'<div class="stack">{bar}</div><ul class="legend">{legend}</ul>' if bar else ""
    return f"<section><h2>What sits at the peak</h2>{where}{stack}{table}</section>"


def _blocks(blocks: Sequence[BlockRow]) -> str:
    if not blocks:
        return ""
    strip = "".join(f'<i class="{_decision_class(b)}" title="{escape(b.module)}: {escape(b.decision)}"></i>' for b in blocks)
    kinds = {b.decision: _decision_class(b) for b in blocks}
    counts = {d: sum(b.decision == d for b in blocks) for d in kinds}
    legend = "".join(_legend_item(style, f"{escape(d)} <b>{counts[d]}</b>") for d, style in kinds.items())
    rows = "".join(_block_row(block) for block in blocks)
    held, plain = sum(b.nbytes_held for b in blocks), sum(b.nbytes_plain for b in blocks)
    added = sum(b.extra_seconds for b in blocks)
    total = (
        f"{format_bytes(held)} held for backward instead of {format_bytes(plain)}, for {format_seconds(added)} more per step"
    )
    head = ("block", "decision", "#held", "#plain", "of plain", "#time", "#added")
    return (
        f'<section><h2>Block by block</h2><p class="soft">{total}</p><div class="strip">{strip}</div>'
        f'<ul class="legend">{legend}</ul>{_table(head, rows, scroll=True)}</section>'
    )


def _block_row(block: BlockRow) -> str:
    held = _percent(block.nbytes_held / block.nbytes_plain if block.nbytes_plain else 0.0)
    added = f"+{format_seconds(block.extra_seconds)}" if block.extra_seconds > 0 else ""
    style = _decision_class(block)
    return (
        f'<tr><td class="name"><code title="{escape(block.module)}">{escape(block.module)}</code></td>'
        f'<td><span class="pill {style}">{escape(block.decision)}</span></td>'
        f'<td class="num">{format_bytes(block.nbytes_held)}</td><td class="num soft">{format_bytes(block.nbytes_plain)}</td>'
        f'<td class="share"><i class="ghost"></i><i class="{style}" style="width:{held}"></i></td>'
        f'<td class="num">{format_seconds(block.seconds)}</td><td class="num soft">{added}</td></tr>'
    )


def _decision_class(block: BlockRow) -> str:
    parts = [word for word in ("recompute", "offload") if word in block.decision]
    return f"d-{'-'.join(parts)}" if parts else ("d-keep" if block.decision == "keep" else "d-other")


def _reasons(why: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in why)
    return f'<section><h2>Why this plan</h2><ol class="why">{listed}</ol></section>' if why else ""


def _environment(report: Report) -> str:
    facts = {"plan for trace": report.plan.trace, "decided in": format_seconds(report.plan.solve_seconds)}
    facts.update({str(key): _plain(value) for key, value in report.environment.items()})
    listed = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(fact)}</dd></div>" for key, fact in facts.items() if fact)
    return f'<section><h2>Environment</h2><dl class="environment">{listed}</dl></section>'


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(part)}" for key, part in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else str(value)


def _table(heads: Iterable[str], rows: str, *, scroll: bool = False) -> str:
    """A head that begins with # stands over numbers."""
    cells = "".join(f'<th class="num">{h[1:]}</th>' if h.startswith("#") else f"<th>{h}</th>" for h in heads)
    return f'<div class="table{" tall" * scroll}"><table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div>'


def _legend_item(style: str, label: str) -> str:
    return f'<li><span class="swatch {style}"></span>{label}</li>'


def _voice(outcome: Outcome) -> str:
    return "measured" if outcome.source == "measured" else "predicted"


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


# --- the chart


@dataclass(frozen=True)
class _Chart:
    """What is drawn over one axis of time."""

    moments: list[Moment]  # drawn as a stack, by kind
    until: float  # where the outcome of the stack ends
    line: list[Moment]  # drawn over it: the measured total; empty: not measured, or already the stack
    line_until: float
    lanes: dict[str, list[Span]]
    series: Series

    @cached_property
    def end(self) -> float:
        return max([self.until, self.line_until, *(s.end for spans in self.lanes.values() for s in spans)]) or 1.0

    @cached_property
    def highest(self) -> int:
        stacked = map(sum, zip(*self.series.values(), strict=True))
        return max(1, *stacked, *(m.total for m in (*self.moments, *self.line)))


def _timeline(report: Report) -> str:
    outcomes = [o for o in (report.predicted, report.measured) if o]
    shown = next((o for o in outcomes if o.timeline), None)
    chart = _chart(
        shown, report.measured if report.measured is not shown else None, next((o for o in outcomes if o.lanes), None)
    )
    if not chart.moments and not chart.lanes:
        return '<section><h2>Memory over the step</h2><p class="soft">No timeline was recorded.</p></section>'
    memory = _memory(report, chart) + _phases(chart) if chart.moments else ""
    lanes = "".join(_lane(name, spans, chart.end) for name, spans in chart.lanes.items())
    by = f", {_voice(shown)}" if shown else ""
    return (
        f'<section><h2>Memory over the step<span class="soft">{by}</span></h2>{_legend(chart)}'
        f'<div id="chart" class="chart" tabindex="0" role="group" aria-label="memory over time; arrow keys move the cursor">'
        f'{memory}{lanes}{_time_axis(chart.end)}<div class="cursor" hidden></div>'
        f'<div class="tip" role="status" hidden></div></div>'
        f'<script id="data" type="application/json">{_tooltip_data(chart)}</script></section>'
    )


def _chart(shown: Outcome | None, seen: Outcome | None, busy: Outcome | None) -> _Chart:
    moments = thin_moments(shown.timeline) if shown else []
    line = thin_moments(seen.timeline) if seen else []
    return _Chart(
        moments=moments,
        until=_until(shown, moments),
        line=line,
        line_until=_until(seen, line),
        lanes=_lanes(busy) if busy else {},
        series=_series(moments),
    )


def _until(outcome: Outcome | None, moments: Sequence[Moment]) -> float:
    return max(outcome.seconds, moments[-1].at) if outcome and moments else 0.0


def thin_moments(moments: Sequence[Moment], limit: int = LIMIT) -> list[Moment]:
    """At most `limit` moments in order of time; of each stretch the highest and the lowest stay, so the peak always does."""
    usable = sorted((m for m in moments if math.isfinite(m.at)), key=lambda m: m.at)
    if len(usable) <= limit:
        return usable
    stretch = math.ceil(len(usable) / (limit // 2))
    kept: list[Moment] = []
    for start in range(0, len(usable), stretch):
        part = range(start, min(start + stretch, len(usable)))
        ends = {max(part, key=lambda i: usable[i].total), min(part, key=lambda i: usable[i].total)}
        kept += [usable[i] for i in sorted(ends)]
    return kept


def thin_spans(spans: Sequence[Span], limit: int = LIMIT) -> list[Span]:
    """At most `limit` spans of one lane; where there are more, neighbours are joined."""
    stretch = math.ceil(len(spans) / limit)
    if stretch <= 1:
        return list(spans)
    joined = []
    for start in range(0, len(spans), stretch):
        part = spans[start : start + stretch]
        name = f"{part[0].name} and {len(part) - 1} more" if len(part) > 1 else part[0].name
        joined.append(Span(lane=part[0].lane, name=name, start=part[0].start, end=max(s.end for s in part)))
    return joined


def _lanes(outcome: Outcome) -> dict[str, list[Span]]:
    spans = sorted((s for s in outcome.lanes if math.isfinite(s.start) and math.isfinite(s.end)), key=lambda s: s.start)
    found = dict.fromkeys(s.lane for s in spans)
    order = [*(name for name in LANES if name in found), *(name for name in found if name not in LANES)]
    return {name: [s for s in spans if s.lane == name] for name in order}


def _series(moments: Sequence[Moment]) -> Series:
    """Bytes by kind at each moment, bottom of the stack first; kinds that never occur are left out."""
    series = {f"k-{kind.value}": [m.kinds.get(kind, 0) for m in moments] for kind in KIND_LABELS}
    series[f"k-{_REST}"] = [max(0, m.total - sum(m.kinds.values())) for m in moments]
    return {style: values for style, values in series.items() if any(values)}


def _series_label(style: str) -> str:
    kind = style.removeprefix("k-")
    return "not told apart" if kind == _REST else KIND_LABELS[Kind(kind)]


def _legend(chart: _Chart) -> str:
    items = [_legend_item(style, _series_label(style)) for style in chart.series]
    if chart.line:
        items.append(_legend_item("line", "measured total"))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _memory(report: Report, chart: _Chart) -> str:
    """The stack with what is laid over it: gridlines below, then the budget, then the peak with its label above the field."""
    budget = report.plan.budget.get(report.home)
    near = budget is not None and budget <= 1.5 * chart.highest  # a budget far above would flatten everything below it
    top = 1.1 * max(chart.highest, budget if near and budget else 0)
    unit, name = next(((u, n) for u, n in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if top >= u), (1, "B"))
    heights = [(tick, _percent(tick * unit / top)) for tick in _ticks(top / unit, 6)]
    rules = "".join(f'<i class="rule" style="bottom:{height}"></i>' for _, height in heights)
    marks = "".join(f'<span style="bottom:{height}">{tick:g}</span>' for tick, height in heights)
    peak = max(chart.moments, key=lambda m: m.total)
    across = peak.at / chart.end
    side, margin = ("left", across) if across < 0.5 else ("right", 1 - across)  # the label runs towards the wider side
    limit = ""
    if budget is not None:  # named on the side where the peak is not
        place = (
            f'class="budget off-{side}" style="bottom:{_percent(budget / top)}"' if near else f'class="budget far off-{side}"'
        )
        limit = f"<div {place}><span>budget {format_bytes(budget)}{'' if near else ', above this chart'}</span></div>"
    spot = f'style="left:{_percent(across)};bottom:{_percent(peak.total / top)}"'
    return (
        f'<div class="row"><div class="gutter unit">{name}</div><div class="flags"><p class="flag {side}" '
        f'style="margin-{side}:{_percent(margin)}"><b>peak {format_bytes(peak.total)}</b> {escape(peak.where)}</p></div></div>'
        f'<div class="row"><div class="gutter ticks">{marks}</div><div class="field memory">{rules}'
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" role="img" aria-label="bytes by kind">'
        f'{_paths(chart, top)}</svg>{limit}<i class="stem {side}" {spot}></i><i class="dot" {spot}></i></div></div>'
    )


def _paths(chart: _Chart, top: float) -> str:
    """Each area reaches down to zero and is painted over by those below it in the stack: half the points of true bands."""
    times, start = [m.at for m in chart.moments], _WIDE * chart.moments[0].at / chart.end
    tops = accumulate(chart.series.values(), lambda below, on: [a + b for a, b in zip(below, on, strict=True)])
    paths = []
    for style, values in zip(chart.series, tops, strict=True):
        edge = _edge(zip(times, values, strict=True), chart.until, chart.end, top)
        paths.append(f'<path class="area {style}" d="{edge}V{_HIGH}H{start:.1f}Z"/>')
    line = _edge(((m.at, m.total) for m in chart.line), chart.line_until, chart.end, top)
    return "".join(reversed(paths)) + (f'<path class="measured" d="{line}"/>' if chart.line else "")


def _edge(points: Iterable[tuple[float, float]], until: float, end: float, top: float) -> str:
    """A stepped line: memory stays as it is from one moment to the next. `until` is where the last value ends."""
    path: list[str] = []
    here = ""
    for at, value in points:
        x, y = f"{_WIDE * at / end:.1f}", f"{_HIGH * (1 - value / top):.1f}"
        if y != here:  # a value that stays draws nothing: the next horizontal runs on
            path.append(f"H{x}V{y}" if path else f"M{x} {y}")
            here = y
    return f"{''.join(path)}H{_WIDE * until / end:.1f}"


def _phases(chart: _Chart) -> str:
    """A band that says where backward and the optimizer's step begin, if the ops say so by their names ("backward of ...")."""
    starts: dict[str, float] = {}
    for before, moment in pairwise([chart.moments[0], *chart.moments]):  # an op began when the one before it was done
        for phase in Phase:
            if phase.value not in starts and moment.where.startswith(phase.value):
                starts[phase.value] = before.at
    if len(starts) < 2:
        return ""
    bounds = pairwise([*(at / chart.end for at in starts.values()), chart.until / chart.end])
    drawn = "".join(
        f'<span style="left:{_percent(left)};width:{_percent(right - left)}">{phase}</span>'
        for phase, (left, right) in zip(starts, bounds, strict=True)
    )
    return f'<div class="row phases"><div class="gutter"></div><div class="field">{drawn}</div></div>'


def _time_axis(end: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if end >= 10 * s), (1e-6, "us"))
    ticks = _ticks(end / scale, 8)
    marks = "".join(f'<span style="left:{_percent(t * scale / end)}">{t:g}</span>' for t in ticks if t * scale <= 0.97 * end)
    return f'<div class="row axis"><div class="gutter unit">{unit}</div><div class="times">{marks}</div></div>'


def _ticks(top: float, count: int) -> list[float]:
    """Round numbers from zero up to `top`, about `count` of them."""
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough), 10 * power)
    return [round(i * step, 10) for i in range(int(top / step) + 1)]


def _lane(name: str, spans: Sequence[Span], end: float) -> str:
    """Rectangles in two alternating shades, so that neighbours without a gap can be told apart."""
    busy = _busy(spans)
    shades = ["", ""]
    for i, span in enumerate(thin_spans(spans)):
        left, width = _WIDE * span.start / end, max(0.3, _WIDE * (span.end - span.start) / end)
        shades[i % 2] += f"M{left:.1f} 0h{width:.1f}v10h-{width:.1f}z"
    drawn = "".join(f'<path class="shade{i}" d="{d}"/>' for i, d in enumerate(shades) if d)
    style = name.replace(" ", "-") if name in LANES else "other"
    return (
        f'<div class="row lane l-{style}"><div class="gutter" title="{escape(name)}">{escape(name)}'
        f'<small>{format_seconds(busy)}</small></div><div class="field"><svg viewBox="0 0 {_WIDE} 10" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(name)}">{drawn}</svg></div></div>'
    )


def _busy(spans: Sequence[Span]) -> float:
    """Seconds in which at least one span runs: copies of one lane may be on their way together. `spans` begin in order."""
    total = until = 0.0
    for span in spans:
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def _tooltip_data(chart: _Chart) -> str:
    """What the script reads, as JSON. A name could close the script element: as escapes its angle brackets are only text."""
    data = {
        "end": chart.end,
        "at": [m.at for m in chart.moments],
        "where": [m.where for m in chart.moments],
        "total": [m.total for m in chart.moments],
        "kinds": [{"style": k, "label": _series_label(k), "bytes": values} for k, values in chart.series.items()],
        "seen": {"at": [m.at for m in chart.line], "total": [m.total for m in chart.line]},
        "lanes": [
            {"name": name, "spans": [[s.start, s.end, s.name] for s in thin_spans(spans)]}
            for name, spans in chart.lanes.items()
        ],
    }
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- what does not depend on the report

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}: holdall report</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #fff; --ink: #20252b; --soft: #5d6670; --line: #e4e4df; --good: #1d7a4c; --bad: #b3372f;
  --accent: #3d6ea5;
  --param: #3f6fa6; --buffer: #b59d7c; --state: #a78cc9; --grad: #4fa394; --input: #8f979f; --activation: #eaa945;
  --temp: #d2655f;
  --rest: #9aa3ad; --keep: #b4bac1; --recompute: #3f8fb0; --offload: #8d6cb8; --other: #b08a3c; --compute: #66778a;
  --fetch: #c07fae; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1c2024; --ink: #e7e8e6; --soft: #a1a9b1; --line: #30363c; --good: #6cc79a; --bad: #ef8a80;
  --accent: #7fb0e3;
  --param: #5a8cc6; --buffer: #a08a6b; --state: #ab92cf; --grad: #55ab9b; --input: #7d858d; --activation: #dc9f41;
  --temp: #d4706a;
  --rest: #7d868f; --keep: #69717a; --recompute: #4f9fc0; --offload: #a384cf; --other: #c29b4d; --compute: #8494a5;
  --fetch: #d08fbd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
h1, h2, h3, p, ul, ol, dl, dd { margin: 0; padding: 0; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin-bottom: 4px; }
h2 .soft { font-weight: 400; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px;
  margin-top: 18px; }
header { margin-bottom: 24px; }
.soft { color: var(--soft); font-size: 14px; overflow-wrap: anywhere; }
.brand { color: var(--soft); font-size: 13px; letter-spacing: .04em; margin-bottom: 4px; }
.verdict { display: inline-block; margin: 12px 0 16px; padding: 4px 14px; border-radius: 99px; font-weight: 600; }
.good { color: var(--good); background: color-mix(in srgb, var(--good) 13%, transparent); }
.bad { color: var(--bad); background: color-mix(in srgb, var(--bad) 13%, transparent); }
.plain { color: var(--soft); background: color-mix(in srgb, var(--soft) 13%, transparent); }
.facts { display: flex; flex-wrap: wrap; gap: 8px 36px; }
dt { color: var(--soft); font-size: 13px; }
dd { overflow-wrap: anywhere; }
.parity { margin-top: 12px; }
.parity b { font-weight: 400; color: var(--soft); font-size: 13px; margin-right: 6px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; padding: 0; border: 0; background: none; }
.card { flex: 1 1 max(150px, calc(100% / var(--columns) - 12px)); background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 14px 16px; }
.card h3 { display: flex; justify-content: space-between; font-size: 13px; font-weight: 400; color: var(--soft);
  min-height: 22px; }
.card p { display: flex; justify-content: space-between; color: var(--soft); font-size: 13px;
  font-variant-numeric: tabular-nums; }
.card b { font-weight: 400; color: var(--ink); }
.card .big { color: var(--ink); font-size: 24px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.chip { font-size: 12px; line-height: 20px; padding: 0 8px; border-radius: 99px; font-variant-numeric: tabular-nums; }
.meter { position: relative; height: 5px; margin: 6px 0 7px; border-radius: 3px; background: var(--line); }
.meter i { position: absolute; inset: 0 auto 0 0; border-radius: 3px; background: var(--accent); }
.meter.over i { background: var(--bad); }
.meter .mark { inset: -3px auto -3px auto; width: 2px; margin-left: -1px; background: var(--ink); }
.notes { border-left: 4px solid var(--activation); }
.notes ul { list-style: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0 12px; font-size: 13px;
  color: var(--soft); }
.legend b { color: var(--ink); font-weight: 600; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; background: var(--c); }
.swatch.line { height: 0; width: 16px; border-top: 2px solid var(--ink); border-radius: 0; vertical-align: 4px;
  background: none; }
.chart { position: relative; outline-offset: 6px; border-radius: 4px; touch-action: pan-y; --gutter: 72px; }
.row { display: flex; }
.gutter { flex: 0 0 var(--gutter); position: relative; padding-right: 10px; text-align: right; font-size: 12px;
  color: var(--soft); }
.field, .flags, .times { flex: 1; min-width: 0; position: relative; }
.field svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; }
.memory { height: 320px; border-bottom: 1px solid var(--soft); cursor: crosshair; }
.unit { align-self: flex-end; }
.ticks span { position: absolute; right: 10px; transform: translateY(50%); font-variant-numeric: tabular-nums; }
.rule { position: absolute; left: 0; right: 0; border-top: 1px solid var(--line); }
.area { fill: var(--c); stroke: var(--card); stroke-width: .6; vector-effect: non-scaling-stroke; }
.measured { fill: none; stroke: var(--ink); stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.flag { padding: 0 8px 5px; font-size: 13px; color: var(--soft); overflow-wrap: anywhere; }
.flag b { color: var(--ink); }
.flag.left { border-left: 1px solid var(--ink); }
.flag.right { border-right: 1px solid var(--ink); text-align: right; }
.stem { position: absolute; top: 0; border-left: 1px solid var(--ink); }
.stem.right { margin-left: -1px; }
.dot { position: absolute; width: 9px; height: 9px; margin: 0 0 -4.5px -4.5px; border-radius: 50%; background: var(--ink);
  border: 2px solid var(--card); }
.budget { position: absolute; left: 0; right: 0; border-top: 1.5px dashed var(--bad); }
.budget.far { border: 0; top: 22px; }
.budget span { position: absolute; right: 6px; bottom: 2px; font-size: 12px; color: var(--bad); background: var(--card);
  padding: 0 5px;
  border-radius: 4px; white-space: nowrap; }
.budget.off-right span { right: auto; left: 6px; }
.phases .field { height: 22px; margin-bottom: 10px; }
.phases span { position: absolute; padding-left: 5px; font-size: 12px; line-height: 22px; color: var(--soft);
  overflow: hidden;
  border-left: 1px solid var(--soft); white-space: nowrap; text-overflow: ellipsis; }
.phases span:last-child { overflow: visible; }
.lane { margin-top: 6px; align-items: center; cursor: crosshair; }
.lane .gutter { line-height: 1.15; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: var(--ink); }
.lane .gutter small { display: block; color: var(--soft); font-size: 11px; }
.lane .field { height: 24px; border-radius: 4px; overflow: hidden;
  background: color-mix(in srgb, var(--soft) 9%, transparent); }
.shade0 { fill: var(--c); } .shade1 { fill: var(--c); opacity: .82; }
.l-compute { --c: var(--compute); } .l-copy-out { --c: var(--offload); } .l-copy-in { --c: var(--fetch); }
.l-waiting { --c: var(--bad); } .l-other { --c: var(--other); }
.axis { margin-top: 4px; }
.times { height: 20px; }
.times span { position: absolute; transform: translateX(-50%); font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.times span:first-child { transform: none; }
.cursor { position: absolute; top: 0; bottom: 22px; border-left: 1px solid var(--ink); opacity: .55; pointer-events: none; }
.tip { position: fixed; z-index: 2; width: max-content; max-width: min(360px, 92vw); padding: 10px 13px;
  pointer-events: none;
  font-size: 13px; background: var(--card); border: 1px solid var(--line); border-radius: 9px;
  box-shadow: 0 6px 24px rgb(0 0 0 / .18); }
.tip p { display: flex; justify-content: space-between; gap: 18px; font-variant-numeric: tabular-nums; }
.tip p span:first-child { flex: none; max-width: 45%; color: var(--soft); overflow-wrap: anywhere; }
.tip p span:last-child { text-align: right; overflow-wrap: anywhere; }
.tip .where { display: block; font-weight: 600; margin-bottom: 4px; overflow-wrap: anywhere; }
.tip hr { border: 0; border-top: 1px solid var(--line); margin: 6px 0; }
.stack { display: flex; height: 16px; margin-top: 14px; border-radius: 5px; overflow: hidden; gap: 1px; }
.stack i { background: var(--c); }
.table { overflow: auto; margin-top: 8px; }
.tall { max-height: 520px; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { position: sticky; top: 0; z-index: 1; background: var(--card); text-align: left; font-weight: 400; font-size: 13px;
  color: var(--soft); }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.name { max-width: 360px; overflow: hidden; text-overflow: ellipsis; }
.num { text-align: right; font-variant-numeric: tabular-nums; }
td.soft { font-size: inherit; }
td.share { position: relative; width: 20%; min-width: 110px; }
td.share + td { padding-left: 14px; }
.share i { position: absolute; left: 0; top: 50%; height: 8px; margin-top: -4px; border-radius: 3px; background: var(--c); }
.share .ghost { width: 100%; background: var(--line); opacity: .6; }
.strip { display: flex; gap: 2px; margin-top: 14px; }
.strip i { flex: 1; height: 22px; border-radius: 3px; background: var(--c); min-width: 1px; }
.pill { font-size: 13px; padding: 1px 10px; border-radius: 99px; color: color-mix(in srgb, var(--c) 62%, var(--ink));
  background: color-mix(in srgb, var(--c) 17%, transparent); }
.d-keep { --c: var(--keep); } .d-recompute { --c: var(--recompute); } .d-offload { --c: var(--offload); }
.d-recompute-offload { --c: var(--accent); } .d-other { --c: var(--other); }
.why { padding-left: 20px; max-width: 78ch; }
.why li { margin-top: 5px; }
.environment { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px 24px;
  margin-top: 8px; }
@media (max-width: 620px) {
  main { padding: 22px 12px 40px; } section { padding: 16px 14px; } h1 { font-size: 24px; }
  .chart { --gutter: 66px; } .gutter { padding-right: 8px; } .memory { height: 240px; }
  .phases span { padding-left: 3px; font-size: 11px; }
  .times span:nth-child(even) { display: none; } .name { max-width: 190px; } }
@media print { .tall { max-height: none; } body { background: none; } }
"""
_STYLE += "".join(f".k-{kind.value} {{ --c: var(--{kind.value}); }}\n" for kind in Kind) + ".k-rest { --c: var(--rest); }\n"

_SCRIPT = """
(() => {
  const chart = document.getElementById("chart");
  if (!chart) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const field = chart.querySelector(".field"), cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  const size = n => n >= 0.1 * 2 ** 30 ? (n / 2 ** 30).toFixed(2) + " GiB"
    : n >= 0.1 * 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : (n / 1024).toFixed(1) + " KiB";
  const time = s => s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " us";
  const before = (xs, t, key) => {  // index of the last that has begun by t
    let low = 0, high = xs.length;
    while (low < high) { const mid = (low + high) >> 1; if (key(xs[mid]) <= t) low = mid + 1; else high = mid; }
    return low - 1;
  };
  const element = (tag, text, style) => {
    const made = document.createElement(tag);
    if (text) made.textContent = text;  // as text: a name may hold anything
    if (style) made.className = style;
    return made;
  };
  const line = (label, value, swatch) => {
    const row = element("p"), left = element("span");
    if (swatch) left.append(element("span", "", "swatch " + swatch));
    left.append(label);
    row.append(left, element("span", value));
    tip.append(row);
  };
  function fill(t) {
    tip.replaceChildren();
    const i = before(data.at, t, x => x);
    if (i >= 0 && data.where[i]) tip.append(element("span", data.where[i], "where"));
    line("at", time(t));
    if (i >= 0) {
      line("total", size(data.total[i]));
      for (const kind of [...data.kinds].reverse()) if (kind.bytes[i]) line(kind.label, size(kind.bytes[i]), kind.style);
    }
    const j = before(data.seen.at, t, x => x);
    if (j >= 0) line("measured total", size(data.seen.total[j]), "line");
    const lanes = data.lanes.map(lane => [lane.name, lane.spans.filter(([start, end]) => start <= t && t <= end)]);
    if (lanes.some(([, spans]) => spans.length)) tip.append(element("hr"));
    for (const [name, spans] of lanes) {
      for (const [start, end, what] of spans.slice(0, 3)) line(name, what + ", " + time(end - start));
    }
  }
  function show(t, y) {
    const box = field.getBoundingClientRect(), outer = chart.getBoundingClientRect(), x = box.left + box.width * t / data.end;
    fill(t);
    cursor.hidden = tip.hidden = false;
    cursor.style.left = x - outer.left + "px";
    const wide = tip.offsetWidth, high = tip.offsetHeight, right = x + 16 + wide < innerWidth;
    tip.style.left = Math.max(8, right ? x + 16 : x - 16 - wide) + "px";
    tip.style.top = Math.max(8, Math.min(y + 12, innerHeight - high - 8)) + "px";
  }
  const hide = () => { cursor.hidden = tip.hidden = true; };
  let at = 0;
  const point = event => {
    const box = field.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    if (share < 0 || share > 1) return hide();
    show(share * data.end, event.clientY);
    at = Math.max(0, before(data.at, share * data.end, x => x));
  };
  chart.addEventListener("pointermove", point);
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move || !data.at.length) return;
    event.preventDefault();
    at = Math.max(0, Math.min(data.at.length - 1, at + move * (event.shiftKey ? 10 : 1)));
    show(data.at[at], chart.getBoundingClientRect().top + 40);
  });
})();
"""
