"""Offloading that a whole pass hides: the first blocks of a chain leave during the forward of all that follow.

Their memory is wanted when the last block has run, and again when their own backward comes, which is last. So a copy that takes
as long as several blocks costs nothing, as long as the link is free for it; and what is offloaded need not be recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from holdall.actions.offload import Offload
from holdall.planners._menu import Choice, Item, Menus, kind_of
from holdall.types import Block, Problem

HIDDEN = "offload, hidden"


def hidden_offloads(problem: Problem, menus: Menus, items: Sequence[Item]) -> list[Offload]:
    """An action for each of as many of the first blocks as the link can carry out during one forward and back during one
    backward, in their order."""
    far = problem.hardware.far
    if far is None or not problem.hardware.overlap or "offload" not in problem.allow:
        return []
    blocks = [item.block for item in items]
    ends = list(accumulate(item.forward_seconds for item in items))
    starts = list(accumulate((item.backward_seconds for item in reversed(items)), initial=0.0))[-2::-1]
    sizes = [_size(menus, item.block) for item in items]
    leaves: list[tuple[int, int]] = []  # position of a block, of the one at whose end it has left
    free = 0.0  # when the link is
    for n, size in enumerate(sizes):
        if not size:
            continue
        free = max(free, ends[n]) + far.latency + size / far.write
        gone = next((m for m in range(n + 1, len(ends)) if ends[m] >= free), None)
        if gone is None:
            break
        leaves.append((n, gone))
    found: list[Offload] = []
    free = float("inf")
    for n, gone in leaves:  # the first block is needed last
        begins = min(free, starts[n]) - far.latency - sizes[n] / far.read
        at = min((m for m in range(n + 1, len(starts)) if starts[m] <= begins), default=None)
        if at is None:
            break
        free = begins
        action = Offload.of(problem.trace, blocks[n], overlap=True)
        found.append(replace(action, until=blocks[gone].name, fetch=blocks[at].name))
    return found


def with_hidden(menus: Menus, items: Sequence[Item], offloads: Sequence[Offload]) -> list[Item]:
    """The chain in which these blocks are offloaded, which costs nothing, and have no other choice."""
    names = {action.block for action in offloads}
    return [_settled(menus, item) if item.block.name in names else item for item in items]


def _settled(menus: Menus, item: Item) -> Item:
    found = next(c for c in menus.found[kind_of(item.block)] if c.label == "offload")
    kept = item.choices[0]
    choice = Choice(label=HIDDEN, freed=found.freed, forward=kept.forward, backward=max(kept.backward, found.backward))
    return replace(item, choices=(choice,))


def _size(menus: Menus, block: Block) -> int:
    """Bytes that offloading the block moves; 0: it cannot be."""
    choices = menus.found.get(kind_of(block), ())
    return next((c.out for c in choices if c.label == "offload"), 0)
