"""`holdall actions`: a table of all actions, added ones included."""

from __future__ import annotations

import sys
from typing import Any

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, grid, show, show_json
from holdall.cli._errors import first_line
from holdall.registry import is_own, member_class, member_names


def actions(*, json: given.Json = False) -> None:
    """List the actions for --allow: whether each is exact, is used without being named, and what it does.

    Example: holdall actions
    """
    rows = [describe_action(name) for name in member_names("actions")]
    if json:
        show_json(rows)
        return
    table = grid("action", "exact", "by default", "what it does", left=4)
    for row in rows:
        if row["error"]:
            add_row(table, row["name"], "--", "--", cell(f"cannot be used here: {row['error']}", "yellow"))
            continue
        what = row["what"] if row["own"] else f"{row['what']} (added)"
        add_row(table, row["name"], "yes" if row["exact"] else "no", "yes" if row["by_default"] else "no", what)
    show(table)


def describe_action(name: str) -> dict[str, Any]:
    """The facts of an action; `error` says why it cannot be imported, or is empty."""
    own = is_own("actions", name)
    try:
        cls = member_class("actions", name)
        title = (sys.modules[cls.__module__].__doc__ or cls.what).strip().partition("\n")[0]
        what = (title.partition(": ")[2] or title).rstrip(".")
        return {"name": name, "exact": cls.exact, "by_default": cls.by_default, "what": what, "own": own, "error": ""}
    except Exception as error:  # an action of another package may fail in any way
        return {"name": name, "exact": None, "by_default": None, "what": "", "own": own, "error": first_line(error)}
