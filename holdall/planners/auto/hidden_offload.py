"""Offloading hidden by a whole pass: early blocks of a chain are copied out during the forward of all later blocks.

Their memory is needed when the last block has run, and they are read again late, in their own backward. So a copy that takes as
long as several blocks costs nothing while the link is free, and an offloaded block need not be recomputed. The copy holds all
saved tensors of a block, or only those that a program keeps, which recomputes the cheapest: then more blocks can be offloaded.

The very first blocks stay: while they run, the launching thread gains the lead that it needs for starting copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from holdall.actions.offload import Offload, held
from holdall.planning.menus import Item, MenuLine, Menus, kind_of
from holdall.types import KEEP, Action, Choice, Problem

_HIDDEN = Choice(label="offload, hidden")  # its actions are settled outside of the chain
_LEAD = 3  # blocks that stay, in a chain of at least four times as many; an embedding counts as one
_SLACK = 1.15  # of a copy's time: steps may be shorter than predicted, copies are not


@dataclass(frozen=True, slots=True)
class Leaving:
    """An offloaded block: its actions, and their effect."""

    block: str
    actions: tuple[Action, ...]
    line: MenuLine


def hidden_offloads(problem: Problem, menus: Menus, items: Sequence[Item], price: float = 0.0) -> Iterator[list[Leaving]]:
    """The early blocks, in their order, that the link can copy out during one forward and back during one backward: whole, and
    by the program worth the most at `price` seconds per byte."""
    far = problem.hardware.far
    if far is None or not problem.hardware.overlap or not problem.permits(Offload):
        return
    whole = _leaving(problem, menus, items, [_way(menus, item, None) for item in items])
    most = max((sum(c.choice.by_program for c in item.choices) for item in items), default=0)
    by_programs = [_leaving(problem, menus, items, [_way(menus, item, n) for item in items]) for n in range(most)]
    best = max(by_programs, key=lambda some: sum(one.line.freed * price - one.line.seconds for one in some), default=[])
    yield from (found for found in (whole, best) if found)


def price_of(answer: tuple[float, Sequence[MenuLine]] | None) -> float:
    """Average seconds per byte of the dynamic program's answer; 0: unknown."""
    freed = sum(c.freed for c in answer[1]) if answer is not None else 0
    return answer[0] / freed if answer is not None and freed > 0 else 0.0


def with_hidden(items: Sequence[Item], leaving: Sequence[Leaving]) -> list[Item]:
    """The chain in which these blocks have this choice only."""
    settled = {one.block: one.line for one in leaving}
    return [replace(i, choices=(settled[i.block.name],)) if i.block.name in settled else i for i in items]


def _way(menus: Menus, item: Item, program: int | None) -> tuple[Choice, MenuLine] | None:
    """The choice for an offloaded block and its effect; `out` is the bytes moved. None: the block cannot be offloaded so."""
    kept = item.choices[0]
    whole = next((c for c in menus.found.get(kind_of(item.block), ()) if c.choice == held(late=True)), None)
    if whole is None or not whole.out:
        return None
    line = replace(kept, choice=_HIDDEN, freed=whole.freed, backward=max(kept.backward, whole.backward), out=whole.out)
    if program is None:
        return KEEP, line
    programs = [c for c in item.choices if c.choice.by_program and c.freed < whole.out]
    if program >= len(programs):
        return None
    by = programs[program]
    return by.choice, replace(line, seconds=by.seconds, forward=by.forward, out=whole.out - by.freed)


def _leaving(
    problem: Problem, menus: Menus, items: Sequence[Item], ways: Sequence[tuple[Choice, MenuLine] | None]
) -> list[Leaving]:
    far = problem.hardware.far
    assert far is not None
    blocks = [item.block for item in items]
    lead = _LEAD if len(blocks) >= 4 * _LEAD else 0
    ends = list(
        accumulate(item.forward_seconds for item in items[: len(menus.chain)])
    )  # later items have no forward to wait for
    starts = list(accumulate((item.backward_seconds for item in reversed(items)), initial=0.0))[-2::-1]
    gone: dict[int, int] = {}  # position of a block -> of the block at whose end its copy is done
    free = 0.0  # when the link is free
    for n, way in enumerate(ways):
        if way is None or n < lead:
            continue
        free = max(free, ends[n]) + _SLACK * (far.latency + way[1].out / far.write)
        at = next((m for m in range(n + 1, len(ends)) if ends[m] >= free), None)
        if at is None:
            break
        gone[n] = at
    found: list[Leaving] = []
    free = float("inf")
    for n, last in gone.items():  # the first block is needed last
        way = ways[n]
        assert way is not None
        begins = min(free, starts[n]) - _SLACK * (far.latency + way[1].out / far.read)
        at = min((m for m in range(n + 1, len(starts)) if starts[m] <= begins), default=None)
        if at is None:
            break
        free = begins
        away = Offload.of(problem.trace, blocks[n], overlap=True)
        away = replace(away, until=blocks[last].name, fetch=blocks[at].name)
        settled = replace(way[1], out=0)  # hidden: the dynamic program need not count it
        found.append(Leaving(blocks[n].name, (*way[0].on(problem.trace, blocks[n]), away), settled))
    return found
