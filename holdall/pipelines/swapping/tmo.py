"""TMO, tensor movement orchestration (Lin et al., HPCA 2023): data-parallel GPUs behind one switch do not all copy at the same
moment. Simulated; what the abstract leaves open is reconstructed.

    contended     every GPU sends the same tensors away, and the link is shared by all copies that are under way
    disjoint      GPUs send different tensors: they are dealt out in turn, in the order in which a step makes them
    orchestrated  the same tensors, but one GPU at a time has the link each way: what is needed soonest comes back first, what
                  was made first leaves first; a copy that has begun is not interrupted

`plan_tmo` takes the faster of the last two. GPUs wait for each other at the end of a step, and every so many blocks of the
backward, where gradients are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.swapping.shared_link import SharedLink, SharedStep, SwapBlock, can_fit, play_shared

CONTENDED, DISJOINT, ORCHESTRATED = "contended", "disjoint", "orchestrated"


@dataclass(frozen=True, slots=True, kw_only=True)
class TmoPlan:
    """A simulated step."""

    way: str
    away: tuple[tuple[int, ...], ...]  # GPU -> the blocks whose tensors leave
    step: SharedStep

    @property
    def seconds(self) -> float:
        return self.step.seconds


def plan_tmo(blocks: Sequence[SwapBlock], link: SharedLink, *, gpus: int, memory: int, sync: int = 0) -> TmoPlan:
    """The faster of TMO's two mechanisms for GPUs of so many bytes. `sync`: blocks of the backward between two exchanges of
    gradients; 0: there is one, at the end. Raises `Infeasible` if a GPU cannot hold what one block needs."""
    ways = (tmo_way(way, blocks, link, gpus=gpus, memory=memory, sync=sync) for way in (ORCHESTRATED, DISJOINT))
    return min(ways, key=lambda plan: plan.seconds)


def tmo_way(way: str, blocks: Sequence[SwapBlock], link: SharedLink, *, gpus: int, memory: int, sync: int = 0) -> TmoPlan:
    """A step by one of the three ways."""
    if not blocks or gpus < 1 or sync < 0:
        raise InvalidInput(
            f"{len(blocks)} blocks on {gpus} GPUs, exchanged every {sync}", hint="use one block and one GPU or more"
        )
    largest = max(block.nbytes for block in blocks)
    if memory < largest:
        raise Infeasible(f"a block holds {largest} bytes, and a GPU has {memory}", hint="use smaller blocks", smallest=largest)
    target = max(0, sum(block.nbytes for block in blocks) - memory)
    away = dealt(blocks, gpus, memory) if way == DISJOINT else (chosen(blocks, target),) * gpus
    step = play_shared(blocks, link, away, memory=memory, in_turns=way == ORCHESTRATED, sync=sync)
    return TmoPlan(way=way, away=away, step=step)


def chosen(blocks: Sequence[SwapBlock], target: int) -> tuple[int, ...]:
    """The first blocks, whose tensors are away longest, that have `target` bytes together."""
    found, freed = [], 0
    for n, block in enumerate(blocks):
        if freed >= target:
            break
        if block.nbytes:
            found.append(n)
            freed += block.nbytes
    return tuple(found)


def dealt(blocks: Sequence[SwapBlock], gpus: int, memory: int) -> tuple[tuple[int, ...], ...]:
    """GPU -> blocks: dealt out in turn in the order of the forward until every GPU's rest fits its memory. Where one round
    through the step is not enough for a GPU it also takes what others have, the earliest first."""
    target = max(0, sum(block.nbytes for block in blocks) - memory)
    found: list[list[int]] = [[] for _ in range(gpus)]
    freed = [0] * gpus
    turn = 0
    for n, block in enumerate(blocks):
        takers = [g % gpus for g in range(turn, turn + gpus) if freed[g % gpus] < target]
        if not takers or not block.nbytes:
            continue
        found[takers[0]].append(n)
        freed[takers[0]] += block.nbytes
        turn = takers[0] + 1
    for gpu, own in enumerate(found):
        for n, block in enumerate(blocks):
            if n not in own and block.nbytes and (freed[gpu] < target or not can_fit(blocks, own, memory)):
                own.append(n)
                freed[gpu] += block.nbytes
    return tuple(tuple(sorted(own)) for own in found)
