"""Who does what when on every rank, as one self-contained HTML page in the style of a report."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from holdall.pipelines.simulator import PipeTimeline, TaskSpan
from holdall.pipelines.tasks import OVERLAP, UPDATE, PipeTask
from holdall.reporting._page import PAGE, STYLE, legend_item
from holdall.units import format_bytes

_ROW, _GAP, _WIDTH = 26.0, 8.0, 1000.0
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    OVERLAP: "forward with backward",
}
_OWN = """
.pipe svg { width: 100%; height: auto; display: block; }
.pipe text { font: 11px system-ui, sans-serif; fill: #fff; text-anchor: middle; dominant-baseline: central;
  pointer-events: none; }
.pipe .name { fill: var(--soft); text-anchor: end; }
.pipe .idle { fill: var(--line); opacity: .5; }
.pipe rect { stroke: var(--card); stroke-width: .7; }
.t-F { --c: var(--param); fill: var(--c); } .t-F.odd { --c: var(--accent); }
.t-B { --c: var(--grad); fill: var(--c); } .t-I { --c: var(--grad); fill: var(--c); }
.t-W { --c: var(--activation); fill: var(--c); } .t-OVERLAP_F_B { --c: var(--offload); fill: var(--c); }
.t-U { --c: var(--bad); fill: var(--c); }
.later { filter: brightness(.8); }
.pipe .held { fill: var(--activation); stroke: none; } .pipe .fixed { fill: var(--param); stroke: none; }
.pipe .limit { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 4 3; }
"""


def pipeline_page(found: PipeTimeline, *, facts: Mapping[str, str]) -> str:
    """The page. `facts` are plain text, beside those of the timeline; all of it is simulated."""
    made = found.pipeline
    title = f"{made.name}: {made.ranks} ranks, {made.micro_batches} micro-batches"
    said = {
        "step": f"{found.makespan:g}",
        "bubble": f"{100 * found.bubble:.1f} %",
        "stages": f"{made.chain}" + (f", {made.copies} copies" if made.copies > 1 else ""),
        **facts,
    }
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in said.items() if v)
    header = (
        f'<header><p class="brand">holdall pipeline</p><h1>{escape(title)}</h1>'
        f'<p class="verdict plain">simulated, not measured</p><dl class="facts">{listed}</dl></header>'
    )
    return page_of(title, f"{header}{schedule_section(found)}{_table(found)}")


def page_of(title: str, body: str) -> str:
    return PAGE.format(title=escape(title), style=STYLE + _OWN, body=body, script="")


def schedule_section(found: PipeTimeline) -> str:
    """Who does what when on every rank."""
    kinds = dict.fromkeys(span.task.kind for span in found.spans if span.task.kind in _NAMES)
    legend = "".join(legend_item(f"t-{kind}", _NAMES[kind]) for kind in kinds)
    return (
        "<section><h2>Who does what when</h2>"
        f'<p class="soft">numbers are micro-batches; darker: a rank\'s later stages; grey: idle</p>'
        f'<ul class="legend">{legend}</ul><div class="pipe">{_drawing(found)}</div></section>'
    )


def _drawing(found: PipeTimeline) -> str:
    ranks = found.pipeline.ranks
    height = ranks * (_ROW + _GAP)
    scale = (_WIDTH - 60) / (found.makespan or 1.0)
    rows = "".join(
        f'<text class="name" x="50" y="{_top(rank) + _ROW / 2:g}">rank {rank}</text>'
        f'<rect class="idle" x="60" y="{_top(rank):g}" width="{_WIDTH - 60:g}" height="{_ROW:g}"/>'
        for rank in range(ranks)
    )
    boxes = "".join(_box(found, span, scale) for span in found.spans if span.task.kind != UPDATE)
    return f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="tasks of every rank in time">{rows}{boxes}</svg>'


def _top(rank: int) -> float:
    return rank * (_ROW + _GAP)


def _box(found: PipeTimeline, span: TaskSpan, scale: float) -> str:
    x, width = 60 + span.start * scale, (span.end - span.start) * scale
    own = found.pipeline.stages_of(span.rank)
    later = " later" if span.task.stage != own[0] else ""
    text = _label(span.task)
    shown = f'<text x="{x + width / 2:.2f}" y="{_top(span.rank) + _ROW / 2:g}">{text}</text>' if width > 7 * len(text) else ""
    return (
        f"<g><title>{escape(str(span.task))}: {span.start:g} to {span.end:g}</title>"
        f'<rect class="t-{span.task.kind}{later}" x="{x:.2f}" y="{_top(span.rank):g}" width="{width:.2f}" height="{_ROW:g}"/>'
        f"{shown}</g>"
    )


def _label(task: PipeTask) -> str:
    return "+".join(str(work.batch) for work in task.works)


def _table(found: PipeTimeline) -> str:
    heads = ("rank", "stages", "busy", "idle", "micro-batches held", "versions of weights", "bytes")
    rows = ""
    for rank in range(found.pipeline.ranks):
        held = found.held[rank]
        cells = (
            str(rank),
            " ".join(map(str, found.pipeline.stages_of(rank))),
            f"{found.busy(rank):g}",
            f"{found.idle(rank):g}",
            str(held.micro_batches),
            str(held.versions),
            format_bytes(held.bytes) if held.bytes else "",
        )
        rows += "<tr>" + "".join(f'<td class="num">{escape(cell)}</td>' for cell in cells) + "</tr>"
    head = "".join(f'<th class="num">{h}</th>' for h in heads)
    return (
        '<section><h2>Rank by rank</h2><div class="table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )
