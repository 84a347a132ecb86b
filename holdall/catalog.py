"""The catalogue of published systems: the idea of each, the files that implement it here, and the tests that check it.

It is a data file, so that the command line can print it and a test can check that the files and tests exist.
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
    missing: tuple[str, ...] = ()  # parts of the paper that are not implemented or not tested, with the reason

    @property
    def is_partial(self) -> bool:
        return bool(self.lives and self.missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a system's paper, and the test that asserts it, as `file::function`."""

    says: str
    test: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """A published order of two planners at the same memory."""

    faster: str
    slower: str
    says: str  # the published words, in ours
    factor: float | None = None  # published seconds of the slower over those of the faster, at most; None: the order alone


@cache
def orderings() -> tuple[Ordering, ...]:
    """Which planner is published to be faster than which."""
    table = json.loads((files("holdall") / "data" / "orderings.json").read_text(encoding="utf-8"))
    found: tuple[Ordering, ...] = _json.unpack(tuple[Ordering, ...], table, "orderings.json")
    return found


@cache
def systems() -> tuple[System, ...]:
    """Every system, family by family."""
    table = json.loads((files("holdall") / "data" / "catalog.json").read_text(encoding="utf-8"))
    found: tuple[System, ...] = _json.unpack(tuple[System, ...], table, "catalog.json")
    return found


@cache
def claims(name: str) -> tuple[Claim, ...]:
    """The tested claims of a system."""
    table = json.loads((files("holdall") / "data" / "claims.json").read_text(encoding="utf-8"))
    found: tuple[Claim, ...] = _json.unpack(tuple[Claim, ...], table.get(system(name).id, []), "claims.json")
    return found


def system(name: str) -> System:
    """The system with this id."""
    for found in systems():
        if found.id == name:
            return found
    raise unknown_name("system", name, [found.id for found in systems()])


def state(system: System) -> str:
    """The files of the system and what is missing there; or that it is not implemented yet."""
    lives = ", ".join(system.lives) or NOT_YET
    return f"{lives} (partial: {'; '.join(system.missing)})" if system.is_partial else lives
