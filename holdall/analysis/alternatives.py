"""The cost of freeing memory in other ways: every choice for every kind of block, in milliseconds per GiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.actions.place import Place
from holdall.cost.link import copy_seconds
from holdall.planning.menus import MenuLine, Menus, kind_of, try_offered
from holdall.simulator import simulate
from holdall.types import Problem
from holdall.units import GiB


@dataclass(frozen=True, kw_only=True)
class Alternative:
    what: str  # recompute, offload, ...
    where: str  # class name of the blocks, or another target
    count: int  # number of blocks with this choice
    freed: int  # bytes, all blocks together
    seconds: float  # recomputation, or the step's increase where it was simulated whole
    copying: float  # seconds on the link, both ways, which computation may hide

    @property
    def per_gib(self) -> float:
        """Seconds per GiB if every copy is hidden."""
        return self.seconds * GiB / self.freed

    @property
    def per_gib_unhidden(self) -> float:
        """Seconds per GiB if no copy is hidden."""
        return (self.seconds + self.copying) * GiB / self.freed


def alternatives(problem: Problem) -> tuple[Alternative, ...]:
    """The cheapest first. `problem` has a trace with seconds. Bytes and seconds are against keeping everything."""
    menus = try_offered(problem)
    found = [_of_blocks(problem, menus, kind, c) for kind, lines in menus.found.items() for c in _distinct(problem, lines)]
    found += _of_states(problem)
    return tuple(sorted(found, key=lambda a: (a.per_gib_unhidden, a.what)))


def _distinct(problem: Problem, lines: Sequence[MenuLine]) -> list[MenuLine]:
    """Without copies that are waited for where others are hidden, and without what comes to the same."""
    found: dict[tuple[int, float, int], MenuLine] = {}
    for c in lines:
        waits = problem.hardware.overlap and c.choice.moves and not c.late
        if c.freed > 0 and not waits:
            found.setdefault((c.freed, c.seconds, c.out), c)
    return list(found.values())


def _of_blocks(problem: Problem, menus: Menus, kind: int, line: MenuLine) -> Alternative:
    blocks = [b for b in menus.chain if kind_of(b) == kind]
    copying = 0.0
    if line.out:
        tier = problem.other(line.choice.tier)
        copying = copy_seconds(line.out, problem.hardware, problem.home, tier)
        copying += copy_seconds(line.back, problem.hardware, tier, problem.home)
    return Alternative(
        what=line.label,
        where=blocks[0].kind or blocks[0].module,
        count=len(blocks),
        freed=line.freed * len(blocks),
        seconds=line.seconds * len(blocks),
        copying=copying * len(blocks),
    )


def _of_states(problem: Problem) -> list[Alternative]:
    """States and updates on the host, simulated whole."""
    if not problem.permits(Place) or problem.hardware.far is None or not problem.trace.units:
        return []
    when = "overlap_forward" if problem.hardware.overlap else "step"
    plain = simulate(problem, [Place.all(problem.trace)] if problem.trace.about.precision else [])
    placed = simulate(problem, [Place.all(problem.trace, update="host", when=when)])
    freed = plain.peak[problem.home] - placed.peak[problem.home]
    if freed <= 0:
        return []
    slower = max(0.0, placed.seconds - plain.seconds)
    count = len(problem.trace.units)
    return [Alternative(what="states on the host", where="units", count=count, freed=freed, seconds=slower, copying=0.0)]
