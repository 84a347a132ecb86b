"""The cost of freeing memory in other ways: every choice for every kind of block, in milliseconds per GiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.actions.place import Place
from holdall.actions.reschedule import region
from holdall.cost.link import copy_seconds
from holdall.planning.menus import Choice, Menus, kind_of, try_choices
from holdall.simulator import simulate
from holdall.types import Block, Problem
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
    """All alternatives, the cheapest first, compared with keeping everything. `problem` needs a trace with seconds."""
    menus = try_choices(problem)
    found = [_of_blocks(problem, menus, kind, c) for kind, choices in menus.found.items() for c in _distinct(choices)]
    found += _of_states(problem)
    return tuple(sorted(found, key=lambda a: (a.per_gib_unhidden, a.what)))


def _distinct(choices: Sequence[Choice]) -> list[Choice]:
    """The choices without "now", which makes the same copies at another time, and without duplicates."""
    found: dict[tuple[int, float, int], Choice] = {}
    for c in choices:
        if c.freed > 0 and not c.label.endswith("now"):
            found.setdefault((c.freed, c.seconds, c.out), c)
    return list(found.values())


def _of_blocks(problem: Problem, menus: Menus, kind: int, choice: Choice) -> Alternative:
    blocks = [b for b in menus.chain if kind_of(b) == kind]
    far, copying = problem.hardware.far, 0.0
    if choice.out and far is not None:
        copying = copy_seconds(choice.out, far, problem.hardware, "out") + copy_seconds(
            choice.back, far, problem.hardware, "in"
        )
    return Alternative(
        what=_in_words(problem, blocks[0], choice.label),
        where=blocks[0].kind or blocks[0].module,
        count=len(blocks),
        freed=choice.freed * len(blocks),
        seconds=choice.seconds * len(blocks),
        copying=copying * len(blocks),
    )


def _in_words(problem: Problem, block: Block, label: str) -> str:
    name, _, rest = label.partition(":")
    if name == "compress":
        return f"compress to {rest} bits (not exact)"
    if name != "program":
        return name
    count = region(problem.trace, block)[1]
    again = sum(int(n) < count for n in rest.split(","))
    return f"recompute {again} of {count} ops"


def _of_states(problem: Problem) -> list[Alternative]:
    """States and updates on the host, simulated whole."""
    if "place" not in problem.allow or problem.hardware.far is None or not problem.trace.units:
        return []
    when = "spill" if problem.hardware.overlap else "step"
    plain = simulate(problem, [Place.all(problem.trace)] if problem.trace.about.get("precision") else [])
    placed = simulate(problem, [Place.all(problem.trace, update="host", when=when)])
    freed = plain.peak[problem.home] - placed.peak[problem.home]
    if freed <= 0:
        return []
    slower = max(0.0, placed.seconds - plain.seconds)
    count = len(problem.trace.units)
    return [Alternative(what="states on the host", where="units", count=count, freed=freed, seconds=slower, copying=0.0)]
