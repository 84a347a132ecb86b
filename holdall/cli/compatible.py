"""`holdall compatible`: which features work together, by the table that the tests check."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdall.cli import _options as given
from holdall.cli._console import add_row, cell, facts, grid, say, show, show_json
from holdall.compatibility import CLOSE, EXACT, REFUSED, SIGNS, feature, members, names, page, pairs, tiers, verdict
from holdall.compatibility import features as known_features

_STYLES = {EXACT: "green", CLOSE: "yellow", REFUSED: "red"}


def compatible(
    features: Annotated[
        list[str] | None, typer.Argument(metavar="[FEATURE]...", help="Two or more, such as offload lora.", show_default=False)
    ] = None,
    *,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/compatibility.md.")] = False,
    json: given.Json = False,
) -> None:
    """Say whether features of plan, model, loop and precision work together, and whether exactly.

    Example: holdall compatible offload lora bf16
    """
    if markdown:
        say(page().rstrip("\n"))
    elif features:
        _one(features, json)
    elif json:
        every = [*pairs(), *((member, name) for member in members() for name in names())]
        show_json([{"features": list(pair), **asdict(verdict(*pair))} for pair in every])
    else:
        _all()


def _one(features: list[str], json: bool) -> None:
    said = verdict(*features)
    if json:
        show_json({"features": features, **asdict(said)})
        return
    show(facts({" + ".join(features): said.level, "why": said.why, "hint": said.hint}))


def _all() -> None:
    """The whole table, with numbers for column names so that it fits eighty columns."""
    known, others = names(), [*members()]
    table = grid("", "", *(str(n + 1) for n in range(len(known))), left=2)
    for n, name in [*enumerate(known, 1), *(("", name) for name in others)]:
        levels = [verdict(name, other).level for other in known]
        add_row(table, n, name, *(cell(SIGNS[level], _STYLES[level]) for level in levels))
    show(table)
    say("\n= exact   ~ close: approximate gradients   x refused before the first step")
    say("optimizers and precision recipes (rows without a number) are derived from their own declarations\n")
    show(facts({f.name: f.what for f in (*known_features(), *(feature(name) for name in others))}))
    say("\ntiers")
    show(facts({**tiers()}))
