"""`holdall planners`: a table of all planners. One that cannot be imported is listed with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.text import Text

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, grid, show, show_json
from holdall.cli._errors import first_line
from holdall.registry import member_class, member_names


def planners(*, json: given.Json = False) -> None:
    """List the planners: what each follows, whether it weighs the budget, its options and their defaults.

    Example: holdall planners
    """
    rows = [describe_planner(name) for name in member_names("planners")]
    if json:
        show_json(rows)
        return
    table = grid("planner", "weighs budget", "options", "paper", left=4)
    for row in rows:
        if row["error"]:
            add_row(table, row["name"], "--", "--", cell(f"cannot be used here: {row['error']}", "yellow"))
            continue
        options = ", ".join(f"{key}={short(value)}" for key, value in row["options"].items())
        add_row(table, row["name"], "yes" if row["weighs_budget"] else "no", Text(options or "--"), row["paper"])
    show(table)


def describe_planner(name: str) -> dict[str, Any]:
    """The facts of a planner; `error` says why it cannot be imported, or is empty."""
    try:
        cls = member_class("planners", name)
        return {
            "name": name,
            "paper": cls.paper,
            "weighs_budget": cls.weighs_budget,
            "options": {field.name: _default(field) for field in dataclasses.fields(cls)},
            "error": "",
        }
    except Exception as error:  # a planner of another package may fail in any way
        return {"name": name, "paper": "", "weighs_budget": None, "options": {}, "error": first_line(error)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    return value if isinstance(value, (bool, int, float, str, type(None))) else list(value)


def short(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
