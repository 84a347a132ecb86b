"""`holdall optimizers`: a table of holdall's and torch's optimizers."""

from __future__ import annotations

import inspect
from typing import Any

from rich.text import Text

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, grid, show, show_json
from holdall.cli._errors import first_line
from holdall.cli.planners import short


def optimizers(*, json: given.Json = False) -> None:
    """List the optimizers that --optimizer takes: what each follows, its options and their defaults.

    Example: holdall optimizers
    """
    from holdall import optim

    rows = [describe_optimizer(name) for name in optim.names()]
    if json:
        show_json(rows)
        return
    table = grid("optimizer", "in plans", "options", "paper", left=4)
    for row in rows:
        if row["error"]:
            add_row(table, row["name"], "--", "--", cell(f"cannot be used here: {row['error']}", "yellow"))
            continue
        options = ", ".join(f"{key}={short(value)}" for key, value in row["options"].items())
        add_row(table, row["name"], "yes" if row["planned"] else "no", Text(options or "--"), row["paper"])
    show(table)


def describe_optimizer(name: str) -> dict[str, Any]:
    """The facts of an optimizer; `error` says why it cannot be imported, or is empty."""
    from holdall import optim

    try:
        cls: Any = optim.find(name)
        return {
            "name": name,
            "paper": getattr(cls, "paper", "torch.optim"),
            "planned": not (getattr(cls, "forward_only", False) or getattr(cls, "consumes_gradients", False)),
            "options": {key: _default(value) for key, value in optim.option_names(name).items()},
            "error": "",
        }
    except Exception as error:  # an optimizer of another package may fail in any way
        return {"name": name, "paper": "", "planned": None, "options": {}, "error": first_line(error)}


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return "required"
    return value if isinstance(value, (bool, int, float, str, type(None))) else list(value)
