"""`holdall precisions`: a table of all precision recipes."""

from __future__ import annotations

from typing import Any

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, grid, say, show, show_json
from holdall.cli._errors import first_line


def precisions(*, json: given.Json = False) -> None:
    """List the precision recipes that --precision takes, with the bytes per parameter that training with AdamW takes.

    Example: holdall precisions
    """
    from holdall import precision

    rows = [describe_recipe(name) for name in precision.names()]
    if json:
        show_json(rows)
        return
    table = grid("precision", "also", "in plans", "bytes", "what it is", left=5)
    for row in rows:
        if row["error"]:
            add_row(table, row["name"], "--", "--", "--", cell(f"cannot be used here: {row['error']}", "yellow"))
            continue
        planned = "yes" if row["planned"] else "no"
        add_row(table, row["name"], ", ".join(row["also"]) or "--", planned, f"{row['bytes']:g}", row["what"])
    show(table)
    say("\nbytes: weights, gradients, float32 copies and states of a parameter under AdamW")
    say("recipes without plans are used in your own loop: `holdall.precision.prepare(NAME, model, optimizer)`")


def describe_recipe(name: str) -> dict[str, Any]:
    """The facts of a recipe; `error` says why it cannot be imported, or is empty."""
    import torch

    from holdall import precision

    try:
        recipe = precision.find(name)
        return {
            "name": name,
            "also": list(recipe.also),
            "what": recipe.what,
            "exact": recipe.exact,
            "planned": not recipe.obstacle,
            "bytes": precision.bytes_per_parameter(recipe, torch.optim.AdamW).total,
            "error": "",
        }
    except Exception as error:  # a recipe of another package may fail in any way
        return {"name": name, "also": [], "what": "", "exact": False, "planned": None, "bytes": 0, "error": first_line(error)}
