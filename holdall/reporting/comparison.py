"""The page of `holdall compare`: all planners on one ruler. Who wins where, time against memory, and what each paper claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from holdall.reporting._page import PAGE, STYLE, legend_item, marked, percent
from holdall.reporting.standings import AUTO, Contest, Standing, Standings, tally
from holdall.units import format_bytes, format_seconds

ALLOWED = 0.02  # how far `auto` may be behind the best planner
_WIDE, _HIGH, _EDGE = 1000, 300, 14

_MORE = """
.ruler td, .ruler th { text-align: right; padding-right: 10px; }
.ruler td:first-child, .ruler th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
.ruler thead tr:first-child th { text-align: center; color: var(--ink); border-left: 1px solid var(--line); }
.ruler .won { color: var(--good); font-weight: 600; background: color-mix(in srgb, var(--good) 13%, transparent); }
.ruler .none { color: var(--soft); font-size: 11px; }
.ruler .lossy { font-style: italic; color: var(--soft); }
.ruler [data-shown] { display: none; } .ruler [data-shown="overhead"] { display: inline; }
.shows-seconds [data-shown], .shows-peak [data-shown], .shows-solved [data-shown] { display: none !important; }
.shows-seconds [data-shown="seconds"], .shows-peak [data-shown="peak"], .shows-solved [data-shown="solved"] {
  display: inline !important; }
.switch { display: flex; gap: 6px; flex-wrap: wrap; margin: 8px 0; }
.switch button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 6px;
  padding: 3px 10px; }
.switch button[aria-pressed="true"] { border-color: var(--accent); color: var(--accent); }
.plot { width: 100%; height: auto; margin-top: 8px; }
.plot circle { fill: var(--rest); fill-opacity: .75; stroke: var(--card); }
.plot .won { fill: var(--good); } .plot .auto { fill: var(--accent); } .plot .lossy { fill: var(--activation); }
.plot line { stroke: var(--line); } .plot text { fill: var(--soft); font-size: 13px; }
.claims td { white-space: normal; vertical-align: top; }
.claims ul { padding-left: 16px; } .claims .good { color: var(--good); } .claims .bad { color: var(--bad); }
.c-won { --c: var(--good); } .c-auto { --c: var(--accent); } .c-lossy { --c: var(--activation); } .c-rest { --c: var(--rest); }
"""

_FIGURES = {  # what the matrix can show in its cells
    "overhead": "time over plain training",
    "seconds": "seconds a step",
    "peak": "peak memory",
    "solved": "planning time",
}
_SWITCH = """
(() => {
  const table = document.querySelector(".ruler"), buttons = [...document.querySelectorAll(".switch button")];
  for (const button of buttons) button.addEventListener("click", () => {
    table.className = "ruler shows-" + button.dataset.figure;
    for (const other of buttons) other.setAttribute("aria-pressed", other === button);
  });
})();
"""


@dataclass(frozen=True, kw_only=True)
class PublishedOrder:
    """Which planner is published to be faster than which, and by how much."""

    faster: str
    slower: str
    says: str


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a planner follows, and the claims of its paper that tests assert: (claim, test)."""

    planner: str
    paper: str
    idea: str
    claims: Sequence[tuple[str, str]]
    missing: Sequence[str] = ()


def render_comparison(
    found: Standings,
    published: Sequence[Published],
    facts: Mapping[str, str],
    orders: Sequence[PublishedOrder] = (),
) -> str:
    """The whole page. `facts`: what else the reader should know of the run, such as hardware and versions. `orders`: published
    relations between planners, which are compared with those of this run."""
    sections = [_headline(found, facts), _matrix(found)]
    sections += [_plot(model, cells) for model, cells in _by_model(found)]
    sections += _orders(found, orders)
    sections.append(_claims(found, published))
    return PAGE.format(title="planners compared", style=STYLE + _MORE, body="\n".join(sections), script=_SWITCH)


def _by_model(found: Standings) -> list[tuple[str, list[Contest]]]:
    return [(model, list(cells)) for model, cells in groupby(found.cells, key=lambda c: c.model)]


def _headline(found: Standings, facts: Mapping[str, str]) -> str:
    worst = found.worst()
    level = "plain" if worst is None else "good" if worst[0] <= ALLOWED else "bad"
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items() if fact)
    return (
        f'<header><p class="brand">holdall compare</p><h1>Planners compared</h1>'
        f'<p class="verdict {level}">{escape(found.verdict())}</p><dl class="facts">{listed}</dl></header>'
    )


def _ranked(found: Standings) -> list[str]:
    """Planners by the number of cells they win, then by name; `auto` first."""
    names = {name for cell in found.cells for name in (*(e.planner for e in cell.entries), *cell.refused)}
    wins = found.wins()
    return sorted(names, key=lambda name: (name != AUTO, -wins[name], name))


def _matrix(found: Standings) -> str:
    models = "".join(f'<th colspan="{len(cells)}">{escape(model)}</th>' for model, cells in _by_model(found))
    budgets = "".join(f'<th title="{format_bytes(cell.nbytes)}">{escape(cell.budget)}</th>' for cell in found.cells)
    wins = found.wins()
    rows = ""
    for name in _ranked(found):
        shown = "".join(_shown(cell, name) for cell in found.cells)
        rows += f"<tr><td><code>{escape(name)}</code></td><td>{wins[name] or ''}</td>{shown}</tr>"
    return (
        '<section><h2>Who wins where</h2><p class="soft">Predicted step time over plain training; green: the fastest, or '
        "within 0.1 % of it. In italics, and out of the contest: a plan that changes the numbers, or leaves the allocator too "
        "little room. A size: the smallest budget with a plan. Empty: no plan; the reason shows on hover. All of it is "
        f'simulated.</p><div class="switch">{_switch()}</div>'
        f'<div class="table"><table class="ruler"><thead><tr><th></th><th></th>{models}</tr>'
        f"<tr><th>planner</th><th>wins</th>{budgets}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _shown(cell: Contest, planner: str) -> str:
    entry = cell.of(planner)
    if entry is None:
        why = cell.refused.get(planner, "not tried")
        return f'<td class="none" title="{escape(why)}">{escape(why) if why.startswith("needs ") else ""}</td>'
    hover = f"{format_seconds(entry.seconds)} a step, {format_bytes(entry.peak)} at the peak, {entry.numerics}"
    hover += ", too little room for the allocator" if entry.cramped else ""
    figures = {
        "overhead": f"{entry.overhead:+.1%}",
        "seconds": format_seconds(entry.seconds),
        "peak": format_bytes(entry.peak),
        "solved": format_seconds(entry.solved),
    }
    shown = "".join(f'<span data-shown="{name}">{figure}</span>' for name, figure in figures.items())
    return f'<td class="{_level(entry)}" title="{escape(hover)}">{shown}</td>'


def _switch() -> str:
    return "".join(
        f'<button type="button" data-figure="{name}" aria-pressed="{str(name == "overhead").lower()}">{label}</button>'
        for name, label in _FIGURES.items()
    )


def _level(entry: Standing) -> str:
    return "won" if entry.wins else "lossy" if not entry.counts else ""


def _plot(model: str, cells: Sequence[Contest]) -> str:
    """Seconds against peak bytes of all plans of a model, as dots that say on hover whose they are."""
    entries = [(cell, e) for cell in cells for e in cell.entries]
    if not entries:
        return f'<section><h2>{escape(model)}</h2><p class="soft">No plan fits any of the budgets.</p></section>'
    peaks, seconds = [e.peak for _, e in entries], [e.seconds for _, e in entries]
    left, right, low, high = min(peaks), max(peaks), min(seconds), max(seconds)

    def placed(entry: Standing) -> tuple[float, float]:
        x = _EDGE + (entry.peak - left) / (right - left or 1) * (_WIDE - 2 * _EDGE)
        y = _HIGH - _EDGE - (entry.seconds - low) / (high - low or 1) * (_HIGH - 2 * _EDGE)
        return x, y

    dots = []
    for cell, entry in sorted(entries, key=lambda pair: (pair[1].wins, pair[1].planner == AUTO)):
        x, y = placed(entry)
        level = "auto" if entry.planner == AUTO else _level(entry)
        says = f"{entry.planner} at {cell.budget}: {format_bytes(entry.peak)}, {format_seconds(entry.seconds)} a step"
        dots.append(f'<circle class="{level}" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{escape(says)}</title></circle>')
    legend = "".join(
        legend_item(f"c-{name}", label)
        for name, label in (("auto", "auto"), ("won", "another winner"), ("lossy", "out of the contest"), ("rest", "others"))
    )
    return (
        f'<section><h2>{escape(model)}<span class="soft">, time against memory</span></h2><ul class="legend">{legend}</ul>'
        f'<svg class="plot" viewBox="0 0 {_WIDE} {_HIGH + 40}" role="img" aria-label="seconds against peak bytes">'
        f'<line x1="0" y1="{_HIGH}" x2="{_WIDE}" y2="{_HIGH}"/>{"".join(dots)}'
        f'<text x="{_EDGE}" y="{_HIGH + 18}">{format_bytes(left)}</text>'
        f'<text x="{_WIDE - _EDGE}" y="{_HIGH + 18}" text-anchor="end">{format_bytes(right)} at the peak</text>'
        f'<text x="{_EDGE}" y="{_HIGH + 36}">lowest: {format_seconds(low)} a step, highest: {format_seconds(high)}</text>'
        "</svg></section>"
    )


def _orders(found: Standings, orders: Sequence[PublishedOrder]) -> list[str]:
    """The section on who is faster than whom; none where no pair has plans in the same cell."""
    rows = []
    for order in orders:
        ours = tally(found, order.faster, order.slower)
        if ours is None:
            continue
        level = "good" if ours.kept == ours.cells else "bad" if not ours.kept else ""
        times = f"{ours.low:.2f} to {ours.high:.2f} times as fast"
        rows.append(
            f"<tr><td><code>{escape(order.faster)}</code> before <code>{escape(order.slower)}</code></td>"
            f"<td>{marked(order.says)}</td><td class='{level}'>{ours.kept} of {ours.cells} cells</td><td>{times}</td></tr>"
        )
    if not rows:
        return []
    return [
        '<section><h2>Who should be faster than whom</h2><p class="soft">Published relations, and the same two planners here: '
        "the cells in which both have a plan.</p>"
        '<div class="table"><table class="claims"><thead><tr><th>order</th><th>published</th><th>holds here in</th>'
        f"<th>by</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    ]


def _claims(found: Standings, published: Sequence[Published]) -> str:
    rows = []
    solved = sum(1 for c in found.cells if c.best)
    for entry in published:
        where = [c for c in found.cells if entry.planner in c.winners]
        listed = "".join(f'<li title="{escape(test)}">{marked(says)}</li>' for says, test in entry.claims)
        gaps = "".join(f'<li class="soft">missing: {marked(text)}</li>' for text in entry.missing)
        ours = ", ".join(f"{escape(c.model)} at {escape(c.budget)}" for c in where) or "nowhere"
        share = f'<div class="meter"><i style="width:{percent(len(where) / solved if solved else 0)}"></i></div>'
        rows.append(
            f"<tr><td><code>{escape(entry.planner)}</code><br><span class='soft'>{escape(entry.paper)}</span></td>"
            f"<td>{escape(entry.idea)}<ul>{listed}{gaps}</ul></td><td>{ours}{share}</td></tr>"
        )
    return (
        '<section><h2>What the papers claim</h2><p class="soft">Each claim is asserted by a test, which is named on hover.</p>'
        '<div class="table"><table class="claims"><thead><tr><th>planner</th><th>idea and tested claims</th><th>wins here</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )
