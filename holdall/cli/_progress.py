"""The bar that verbs draw for anything slow: on stderr, only in a terminal, and gone when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from holdall.types import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A `progress=` callable that moves the bar."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def told(what: str, done: int, total: int, best: str) -> None:
            label = f"{what} ({best})" if best else what
            bar.update(task, description=label, completed=done, total=total or None)

        yield told
