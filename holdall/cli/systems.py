"""`holdall systems`: the catalogue of published systems, with those that are implemented here and those that are not yet."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdall.catalog import System, state
from holdall.catalog import systems as catalogue
from holdall.cli import _options as given
from holdall.cli._console import add_row, grid, say, show, show_json
from holdall.errors import unknown_name


def systems(
    *,
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="NAME", help="Only this family, such as recompute or swap.", show_default=False),
    ] = None,
    json: given.Json = False,
) -> None:
    """List the published systems of this field: source, family, the file that implements each, and the test that checks it.

    Example: holdall systems --family recompute
    """
    found = select(family)
    if json:
        show_json([asdict(system) for system in found])
        return
    table = grid("system", "source", "family", "lives in, proven by", left=4)
    table.columns[3].no_wrap = True  # a path cut in two is of no use
    for system in found:
        places = "\n".join([state(system), *system.proven])
        add_row(table, system.name, system.source, ", ".join(system.families), places)
    show(table)
    here = sum(bool(system.lives) for system in found)
    say(f"\n{here} of {len(found)} are implemented here")


def select(family: str | None) -> list[System]:
    """The systems of a family, or all."""
    families = dict.fromkeys(f for system in catalogue() for f in system.families)
    if family is not None and family not in families:
        raise unknown_name("family", family, families)
    return [system for system in catalogue() if family is None or family in system.families]
