"""A plan over meshes as one self-contained HTML page: who does what when, memory of every rank in the step, bytes on links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from holdall.pipelines.hybrid.plans import HybridPlan, PlayedPlan
from holdall.pipelines.picture import page_of, schedule_section
from holdall.pipelines.tasks import FORWARD, INPUT, LAST
from holdall.reporting._page import legend_item
from holdall.units import format_bytes, format_seconds

_HEIGHT, _GAP, _WIDTH, _LEFT = 54.0, 12.0, 1000.0, 60.0


def mesh_page(found: PlayedPlan, plan: HybridPlan, *, title: str, memory: int, facts: Mapping[str, str]) -> str:
    """The page. `memory`: bytes of a GPU; `facts`: plain text. All of it is simulated."""
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    header = (
        f'<header><p class="brand">holdall plan --gpus</p><h1>{escape(title)}</h1>'
        f'<p class="verdict plain">simulated, not measured</p><dl class="facts">{listed}</dl></header>'
    )
    legend = legend_item("k-param", "states, and what a layer needs for a while") + legend_item("k-activation", "activations")
    curves = "".join(_curve(found, rank, memory) for rank in range(plan.pipes))
    height = plan.pipes * (_HEIGHT + _GAP)
    held = (
        f'<section><h2>Memory of every rank</h2><p class="soft">of one of its GPUs, over the step; dashed: '
        f'{format_bytes(memory)}, what a GPU has</p><ul class="legend">{legend}</ul><div class="pipe">'
        f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="bytes of every rank in time">{curves}</svg>'
        "</div></section>"
    )
    return page_of(title, f"{header}{schedule_section(found.timeline)}{held}{_links(found, plan)}{_stages(found, plan)}")


def held_over_time(found: PlayedPlan, rank: int) -> list[tuple[float, int]]:
    """(second, bytes of activations from then on): forward adds a micro-batch's, backward frees them."""
    changes: list[tuple[float, int, int]] = []  # second, frees before others, bytes
    for span in (s for s in found.timeline.spans if s.rank == rank):
        for work in span.task.works:
            own = found.costs.of(found.timeline.pipeline, work.stage)
            kept = own.activations if own.for_weight is None else own.for_weight
            if work.kind == FORWARD:
                changes.append((span.start, 1, own.activations))
            elif work.kind == INPUT:
                changes.append((span.end, 0, kept - own.activations))
            elif work.kind in LAST:
                changes.append((span.end, 0, -(own.activations if work.kind != LAST[1] else kept)))
    now, points = 0, [(0.0, 0)]
    for second, _, change in sorted(changes):
        now += change
        points.append((second, now))
    return points


def _curve(found: PlayedPlan, rank: int, memory: int) -> str:
    top, end = rank * (_HEIGHT + _GAP), found.timeline.makespan or 1.0
    fixed, points = found.fixed(rank), held_over_time(found, rank)
    most = max(memory, fixed + max(nbytes for _, nbytes in points)) or 1

    def x(second: float) -> float:
        return _LEFT + second / end * (_WIDTH - _LEFT)

    def y(nbytes: float) -> float:
        return top + _HEIGHT * (1 - nbytes / most)

    path = f"M{_LEFT:g} {y(fixed):.2f}"
    for (_, before), (second, after) in pairwise(points):
        path += f"L{x(second):.2f} {y(fixed + before):.2f}L{x(second):.2f} {y(fixed + after):.2f}"
    path += f"L{_WIDTH:g} {y(fixed + points[-1][1]):.2f}L{_WIDTH:g} {y(fixed):.2f}Z"
    low, wide = top + _HEIGHT - y(fixed), _WIDTH - _LEFT
    said = f"rank {rank}: {format_bytes(fixed)} and at most {format_bytes(max(nbytes for _, nbytes in points))}"
    return (
        f"<g><title>{said}</title>"
        f'<text class="name" x="50" y="{top + _HEIGHT / 2:g}">rank {rank}</text>'
        f'<rect class="fixed" x="{_LEFT:g}" y="{y(fixed):.2f}" width="{wide:g}" height="{low:.2f}"/>'
        f'<path class="held" d="{path}"/>'
        f'<line class="limit" x1="{_LEFT:g}" x2="{_WIDTH:g}" y1="{y(memory):.2f}" y2="{y(memory):.2f}"/></g>'
    )


def _links(found: PlayedPlan, plan: HybridPlan) -> str:
    if plan.pipes == 1:
        return ""
    made = found.timeline.pipeline
    rows = []
    for n, cost in enumerate(found.costs.stages[:-1]):
        step = format_bytes(2 * plan.micro_batches * cost.sent)
        rows.append((f"{made.rank_of[n]} and {made.rank_of[n + 1]}", f"{n} and {n + 1}", format_bytes(cost.sent), step))
    said = "activations ahead and their gradients back, of the GPUs that send most; collectives inside a stage are in its time"
    return _table("Bytes between stages", said, ("ranks", "stages", "a message", "a step, both ways"), rows)


def _stages(found: PlayedPlan, plan: HybridPlan) -> str:
    rows = []
    for n, ((a, b), s) in enumerate(zip(pairwise(plan.cut), found.stages, strict=True)):
        seconds = [format_seconds(t) for t in (s.forward, s.backward, s.tail, s.update)]
        rows.append((str(n), f"{a} to {b - 1}", *seconds, format_bytes(int(s.states)), format_bytes(int(s.held))))
    heads = ("stage", "layers", "forward", "backward", "sums after", "update", "states", "activations")
    return _table("Stage by stage", "of one micro-batch, and of one GPU", heads, rows)


def _table(title: str, said: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f'<th class="num">{escape(h)}</th>' for h in heads)
    body = "".join("<tr>" + "".join(f'<td class="num">{escape(c)}</td>' for c in row) + "</tr>" for row in rows)
    return (
        f'<section><h2>{escape(title)}</h2><p class="soft">{escape(said)}</p><div class="table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )
