"""A report as one self-contained HTML page: no server, no network, no script but its own.

It can be sent to people who have neither the model nor `holdall`. This module writes the sections, from the verdict to the
environment; `_chart` draws the timeline, `_page` has the common parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from holdall.reporting._chart import LIMIT, draw_timeline, thin_moments, thin_spans
from holdall.reporting._page import PAGE, SCRIPT, STYLE, legend_item, marked, percent, shortened, voice
from holdall.reporting.text import KIND_LABELS, format_error, step_facts
from holdall.types import BlockRow
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from holdall.reporting.report import Report, Row

__all__ = ["HOLDERS", "LIMIT", "render_html", "thin_moments", "thin_spans"]

HOLDERS = 15  # rows of the table of tensors at the peak


def render_html(report: Report) -> str:
    """The whole page. Sections without data are left out, or say so."""
    title = escape(report.model or "training step")
    body = "\n".join(
        section
        for section in (
            _headline(report, title),
            _cards(report),
            _notes(report.notes),
            draw_timeline(report),
            _at_peak(report),
            _blocks(report.blocks),
            _reasons(report.plan.why),
            _environment(report),
        )
        if section
    )
    return PAGE.format(title=title, style=STYLE, body=body, script=SCRIPT)


def _headline(report: Report, title: str) -> str:
    plan = report.plan
    limits = " + ".join(f"{format_bytes(size)} {report.tier_label(tier)}" for tier, size in plan.budget.items())
    facts = [("planner", plan.planner), ("budget", limits or "none"), ("hardware", plan.hardware), *step_facts(plan).items()]
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
        moved = "".join(
            f"<p>{_link(report, link)} <b>{format_bytes(size)}</b></p>" for link, size in report.latest.traffic.items()
        )
        cards.append(f'<div class="card"><h3>moved per step</h3>{moved}</div>')
    columns = math.ceil(len(cards) / math.ceil(len(cards) / 5))  # as few rows as five per row allow, evenly filled
    return f'<section class="cards" style="--columns:{columns}" aria-label="predicted and measured">{"".join(cards)}</section>'


def _link(report: Report, link: str) -> str:
    """A readable name for a link such as `gpu->cpu`."""
    return escape(" to ".join(report.tier_label(tier) for tier in link.split("->")))


def _card(row: Row, *, ran: bool) -> str:
    chip, error = "", row.error
    if error is not None:
        level = "good" if abs(error) <= 0.05 else "plain"
        chip = f'<span class="chip {level}" title="predicted against measured">{format_error(error)}</span>'
    seen = ran and row.measured is not None
    said = f"<p>predicted <b>{row.said}</b></p>" if row.predicted is not None else "<p>not predicted</p>"
    big, below = (row.seen, said) if seen else (row.said, f"<p>predicted{', not measured' * ran}</p>")
    meter, best = "", row.measured if seen else row.predicted
    if row.limit and best is not None:
        mark = f'<i class="mark" style="left:{percent(row.predicted / row.limit)}"></i>' if seen and row.predicted else ""
        state = " over" if best > row.limit else ""
        meter = f'<div class="meter{state}"><i style="width:{percent(best / row.limit)}"></i>{mark}</div>'
        below += f"<p>budget <b>{format_bytes(row.limit)}</b></p>"
    return f'<div class="card"><h3>{escape(row.label)}{chip}</h3><p class="big">{big}</p>{meter}{below}</div>'


def _notes(notes: Sequence[str]) -> str:
    return f'<section class="notes"><ul>{"".join(f"<li>{marked(n)}</li>" for n in notes)}</ul></section>' if notes else ""


def _at_peak(report: Report) -> str:
    outcome = next((o for o in (report.predicted, report.measured) if o and (o.at_peak or o.peak_kinds)), None)
    if outcome is None:
        return ""
    total = sum(outcome.peak_kinds.values()) or outcome.peak.get(report.home, 0) or sum(h.nbytes for h in outcome.at_peak) or 1
    kinds = [(kind, outcome.peak_kinds.get(kind, 0)) for kind in KIND_LABELS]
    bar = "".join(f'<i class="k-{k.value}" style="width:{percent(n / total)}"></i>' for k, n in kinds if n > 0)
    legend = "".join(legend_item(f"k-{k.value}", f"{KIND_LABELS[k]} <b>{format_bytes(n)}</b>") for k, n in kinds if n > 0)
    most = max((h.nbytes for h in outcome.at_peak), default=0) or 1
    rows = "".join(
        f'<tr><td class="name"><code title="{escape(h.name)}">{escape(shortened(h.name))}</code></td>'
        f'<td><span class="swatch k-{h.kind.value}"></span>{KIND_LABELS[h.kind]}</td>'
        f'<td class="num">{format_bytes(h.nbytes)}</td><td class="num soft">{h.nbytes / total:.1%}</td>'
        f'<td class="share"><i class="k-{h.kind.value}" style="width:{percent(h.nbytes / most)}"></i></td></tr>'
        for h in outcome.at_peak[:HOLDERS]
    )
    left = len(outcome.at_peak) - HOLDERS
    more = f'<p class="soft">and {left} smaller tensors</p>' if left > 0 else ""
    table = _table(("tensor", "kind", "#bytes", "#of the peak", ""), rows) + more if rows else ""
    where = f'<p class="soft">{marked(outcome.peak_where)}, {voice(outcome)}</p>' if outcome.peak_where else ""
    stack = f'<div class="stack">{bar}</div><ul class="legend">{legend}</ul>' if bar else ""
    return f"<section><h2>What sits at the peak</h2>{where}{stack}{table}</section>"


def _blocks(blocks: Sequence[BlockRow]) -> str:
    if not blocks:
        return ""
    strip = "".join(f'<i class="{_decision_class(b)}" title="{escape(b.module)}: {escape(b.decision)}"></i>' for b in blocks)
    kinds = {b.decision: _decision_class(b) for b in blocks}
    counts = {d: sum(b.decision == d for b in blocks) for d in kinds}
    legend = "".join(legend_item(style, f"{escape(d)} <b>{counts[d]}</b>") for d, style in kinds.items())
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
    held = percent(block.nbytes_held / block.nbytes_plain if block.nbytes_plain else 0.0)
    added = f"+{format_seconds(block.extra_seconds)}" if block.extra_seconds > 0 else ""
    style = _decision_class(block)
    return (
        f'<tr><td class="name"><code title="{escape(block.module)}">{escape(shortened(block.module))}</code></td>'
        f'<td><span class="pill {style}">{escape(block.decision)}</span></td>'
        f'<td class="num">{format_bytes(block.nbytes_held)}</td><td class="num soft">{format_bytes(block.nbytes_plain)}</td>'
        f'<td class="share"><i class="ghost"></i><i class="{style}" style="width:{held}"></i></td>'
        f'<td class="num">{format_seconds(block.seconds)}</td><td class="num soft">{added}</td></tr>'
    )


def _decision_class(block: BlockRow) -> str:
    parts = [word for word in ("recompute", "offload") if word in block.decision]
    return f"d-{'-'.join(parts)}" if parts else ("d-keep" if block.decision == "keep" else "d-other")


def _reasons(why: Sequence[str]) -> str:
    listed = "".join(f"<li>{marked(reason)}</li>" for reason in why)
    return f'<section><h2>Why this plan</h2><ol class="why">{listed}</ol></section>' if why else ""


def _environment(report: Report) -> str:
    facts = {"plan for trace": report.plan.trace, "decided in": format_seconds(report.plan.solve_seconds)}
    facts.update({str(key): _plain(value) for key, value in report.environment.items()})
    listed = "".join(
        f'<div class="{_width(fact)}"><dt>{escape(key)}</dt><dd>{escape(fact)}</dd></div>'
        for key, fact in facts.items()
        if fact
    )
    return f'<section><h2>Environment</h2><dl class="environment">{listed}</dl></section>'


def _width(fact: str) -> str:
    """The number of columns for a fact: long ones get more."""
    return "all" if len(fact) > 60 else "two" if len(fact) > 20 else "one"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(part)}" for key, part in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else str(value)


def _table(heads: Iterable[str], rows: str, *, scroll: bool = False) -> str:
    """A table; a head that begins with # is right-aligned, for numbers."""
    cells = "".join(f'<th class="num">{h[1:]}</th>' if h.startswith("#") else f"<th>{h}</th>" for h in heads)
    return f'<div class="table{" tall" * scroll}"><table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div>'
