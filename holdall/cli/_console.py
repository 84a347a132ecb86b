"""Output of the verbs: tables without lines, the same for a pipe and a terminal, and JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000  # columns of a pipe: lines are not wrapped for it


def show(item: RenderableType) -> None:
    """Write to stdout, as wide as the terminal; a pipe gets whole lines unless COLUMNS is set."""
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if bounded else _UNBOUNDED, highlight=False, soft_wrap=False)
    with console.capture() as captured:
        console.print(item)
    typer.echo("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def say(line: str = "") -> None:
    """One line to stdout; the terminal wraps it."""
    typer.echo(line)


def show_json(data: Any) -> None:
    """One JSON document to stdout."""
    typer.echo(json.dumps(data, indent=2))


def in_color() -> bool:
    """May text have colours?"""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def grid(*headers: str, left: int = 1) -> Table:
    """A table without lines; the first `left` columns are left-aligned, the others right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(headers))
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right", overflow="fold")
    return table


def cell(text: object, style: str = "") -> Text:
    """A cell of literal text: brackets are not markup."""
    return Text(str(text), style=style)


def add_row(table: Table, *cells: object) -> None:
    """A row of plain cells."""
    table.add_row(*(c if isinstance(c, Text) else cell(c) for c in cells))


def facts(pairs: dict[str, object]) -> Table:
    """Label and value, one pair per line; empty values are left out."""
    table = grid("", "", left=2)
    for label, value in pairs.items():
        if str(value):
            table.add_row(cell(label, "dim"), cell(value))
    return table
