"""Reports and plans as text tables. Every function returns a string, with colour codes only if `color` is set."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdall.types import BlockRow, Kind, Plan
from holdall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from holdall.reporting.report import Report

KIND_LABELS = {
    Kind.PARAM: "parameters",
    Kind.BUFFER: "buffers",
    Kind.STATE: "optimizer state",
    Kind.GRAD: "gradients",
    Kind.INPUT: "inputs",
    Kind.ACTIVATION: "activations",
    Kind.TEMP: "temporary",
}
"""Readable names of the kinds, in the stacking order of charts: permanent ones at the bottom, temporary ones above."""

_TIERS = {"gpu": "GPU", "cpu": "host", "nvme": "NVMe"}
_COLORS = {Kind.PARAM: "blue", Kind.STATE: "magenta", Kind.GRAD: "cyan", Kind.ACTIVATION: "yellow", Kind.TEMP: "red"}
_DECISION_COLORS = {"recompute": "cyan", "offload": "magenta"}
_WIDTH = 10_000  # no wrapping here: the printer knows the width, and a file has none
_BAR = 32


def step_facts(plan: Plan) -> dict[str, str]:
    """The optimizer and the precision of the planned step, as far as they are known."""
    found = {"optimizer": plan.about.optimizer, "precision": plan.about.recipe}
    return {label: value for label, value in found.items() if value}


def report_text(report: Report, *, color: bool = False) -> str:
    """The comparison: predicted, measured, error."""
    table, sentences = _comparison(report)
    lines = [Text(_printable(f"note: {note}")) for note in report.notes]
    seen = f"measured over {report.steps} step{'s' * (report.steps != 1)}" if report.measured else "not measured yet"
    return _render(Group(table, *sentences, *lines, Text(seen, style="dim")), color=color)


def plan_text(plan: Plan, *, color: bool = False) -> str:
    """A plan's actions, prediction and reasons, and the memory at its peak."""
    said = plan.predicted
    home = next(iter(said.peak), "")
    peaks, budgets = ([f"{format_bytes(n)} {tier_label(t, home)}" for t, n in of.items()] for of in (said.peak, plan.budget))
    facts = {
        "planner": f"{plan.planner} (decided in {format_seconds(plan.solve_seconds)})",
        "hardware": plan.hardware,
        **step_facts(plan),
        "budget": ", ".join(budgets) or "none",
        "actions": ", ".join(f"{n} x {name}" for name, n in sorted(plan.count().items())) or "nothing to do",
        "expected": ", ".join([*peaks, f"{format_seconds(said.seconds)}/step"]),
    }
    arena = plan.about.layout
    if arena is not None:
        facts["layout"] = f"{arena.name}: {len(arena.sizes)} tensors in an arena of {format_bytes(arena.reserved)}"
    table = _grid()
    for label, fact in facts.items():
        table.add_row(Text(label, style="dim"), Text(_printable(fact)))
    parts: list[RenderableType] = [table, *(Text(_printable(f"- {reason}")) for reason in plan.why)]
    if said.peak_kinds:
        where = f" ({said.peak_where})" if said.peak_where else ""
        parts += [Text(), Text(_printable(f"at the peak{where}:")), _bars(said.peak_kinds)]
    return _render(Group(*parts), color=color)


def blocks_text(blocks: Sequence[BlockRow], *, color: bool = False) -> str:
    """The decision for every block; adjacent blocks that differ only in their number share a line."""
    table = _grid("block", "", "decision", "held", "plain", "time", "added", left=3)
    for run in _runs(blocks):
        table.add_row(
            Text(_printable(_span_of([b.module for b in run]))),
            Text(f"x {len(run)}" if len(run) > 1 else "", style="dim"),
            _decision(run[0].decision),
            *_sums(run),
        )
    table.add_row(Text("total", style="bold"), Text(f"x {len(blocks)}", style="dim"), Text(), *_sums(blocks))
    return _render(table, color=color)


def bars(kinds: Mapping[Kind, int], *, color: bool = False) -> str:
    """Memory by kind, the largest first, as horizontal bars."""
    return _render(_bars(kinds), color=color)


def tier_label(tier: str, home: str) -> str:
    """A readable name of a tier; `cpu` is the host only if another device computes."""
    return "CPU" if tier == home == "cpu" else _TIERS.get(tier, tier)


def format_error(error: float | None) -> str:
    """A signed percentage; empty if there is none."""
    if error is None:
        return ""
    text = f"{error:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def _comparison(report: Report) -> tuple[Table, list[Table]]:
    cells = [("", "predicted", "measured", "error")]
    cells += [(row.label, row.said, row.seen, format_error(row.error)) for row in report.rows()]
    sentences = [("loss, grads", "--", report.parity)] if report.parity else []
    # The sentence extends past its column, so both tables get the widths of a single table.
    widths = [max(len(line[i]) for line in [*cells, *sentences]) for i in range(2)]
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(min_width=widths[0])
    table.add_column(min_width=widths[1], justify="right")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row(*(Text(cell, style="bold") for cell in cells[0]))
    for label, said, seen, error in cells[1:]:
        table.add_row(Text(_printable(label)), Text(said), Text(seen), Text(error, style="dim"))
    below = []
    for label, said, sentence in sentences:
        below.append(Table.grid(padding=(0, 3, 0, 0)))
        below[-1].add_column(min_width=widths[0])
        below[-1].add_column(min_width=widths[1], justify="right")
        below[-1].add_row(Text(label), Text(said), Text(_printable(sentence)))
    return table, below


def _bars(kinds: Mapping[Kind, int]) -> Table:
    table = _grid()
    total, largest = sum(kinds.values()), max(kinds.values(), default=0)
    for kind, size in sorted(kinds.items(), key=lambda item: -item[1]):
        if size > 0:
            bar = "\N{FULL BLOCK}" * max(1, round(_BAR * size / largest))
            table.add_row(
                Text(KIND_LABELS[kind]),
                _right(format_bytes(size)),
                _right(f"{size / total:.0%}"),
                Text(bar, style=_COLORS.get(kind, "white")),
            )
    return table


def _runs(blocks: Iterable[BlockRow]) -> list[list[BlockRow]]:
    """Consecutive blocks with the same decision whose names differ only in numbers."""
    return [list(run) for _, run in groupby(blocks, key=lambda b: (re.sub(r"\d+", "#", b.module), b.decision))]


def _span_of(modules: Sequence[str]) -> str:
    """`layers.3` to `layers.9` as `layers.3 .. 9`: the first name, and the rest of the last one after the common part."""
    first, last = modules[0], modules[-1]
    if first == last:
        return first
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    while shared and first[shared - 1].isdigit():  # never cut a number in half
        shared -= 1
    return f"{first} .. {last[shared:]}"


def _sums(blocks: Iterable[BlockRow]) -> list[Text]:
    blocks = list(blocks)
    added = sum(b.extra_seconds for b in blocks)
    return [
        _right(format_bytes(sum(b.nbytes_held for b in blocks))),
        _right(format_bytes(sum(b.nbytes_plain for b in blocks))),
        _right(format_seconds(sum(b.seconds for b in blocks))),
        _right(f"+{format_seconds(added)}" if added > 0 else ""),
    ]


def _decision(decision: str) -> Text:
    style = next((color for word, color in _DECISION_COLORS.items() if word in decision), "")
    return Text(_printable(decision), style=style)


def _right(text: str) -> Text:
    return Text(text, justify="right")


def _grid(*headers: str, left: int = 0) -> Table:
    """A table without lines; the first `left` columns are left-aligned."""
    table = Table(box=None, show_header=bool(headers), pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right")
    return table


def _printable(text: str) -> str:
    """One line without control characters: a module's name must not move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)


def _render(item: RenderableType, *, color: bool) -> str:
    """rich's output as a string, independent of the terminal and the environment."""
    page = io.StringIO()
    console = Console(
        file=page,
        width=_WIDTH,
        force_terminal=color,
        force_jupyter=False,
        color_system="standard" if color else None,
        legacy_windows=False,
    )
    console.print(item)
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())
