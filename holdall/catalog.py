"""The published systems of this field: what each does, where its member lives here, and which test proves it.

The table is data so that it can be read by people, printed by the command line and checked against the tree by a test: a system
is claimed only where its file and its proof exist.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from holdall.errors import unknown_name
from holdall.types import _json

NOT_YET = "not yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One published system. Paths are relative to the root of the repository."""

    id: str
    name: str
    source: str  # where it was published
    year: int  # of the venue named in `source`, else of the preprint; the earliest where there are several
    families: tuple[str, ...]  # recompute, swap, states, shard, parallel, shrink, layout
    idea: str  # one sentence
    lives: tuple[str, ...] = ()  # empty: not built yet
    proven: tuple[str, ...] = ()  # the tests that compare it with its paper


@cache
def systems() -> tuple[System, ...]:
    """Every system, family by family."""
    table = json.loads((files("holdall") / "data" / "catalog.json").read_text(encoding="utf-8"))
    found: tuple[System, ...] = _json.unpack(tuple[System, ...], table, "catalog.json")
    return found


def system(name: str) -> System:
    """The system with this id."""
    for found in systems():
        if found.id == name:
            return found
    raise unknown_name("system", name, [found.id for found in systems()])


def state(system: System) -> str:
    """Where the system lives, or that it does not yet."""
    return ", ".join(system.lives) or NOT_YET
