"""Horovod (arXiv 1802.05799): gradients are summed round a ring, several tensors in one buffer, in an order that one rank sets.

`ring_all_reduce` and `sum_fused` run on any torch.distributed backend with sends and receives. `negotiated` simulates when
tensors that ranks have ready at different moments are summed. torch's own all-reduces (`shard="ddp"`) are what a run should
use: this is the baseline that they are compared with.

A ring of d ranks sums a buffer of X bytes in 2 (d - 1) messages of X / d bytes from every rank to the next: first each part of
the buffer goes round and is added up on its way, then the sums go round. Every part is added up on one rank, so all ranks have
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdall.cost.collectives import collective_seconds
from holdall.errors import InvalidInput
from holdall.types.mesh import ASSUMED, MeshDim, Network

FUSION = 64 << 20  # bytes of the buffer in which tensors are summed together
CYCLE = 5e-3  # seconds from one round of messages to the coordinator to the next


def ring_all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
    """Sum a contiguous tensor over the ranks of a group, in place, by sends and receives alone."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return
    parts = tensor.view(-1).tensor_split(ranks)
    arrived = torch.empty_like(parts[0])  # the first part is the largest
    everyone = dist.get_process_group_ranks(group)
    after, before = everyone[(own + 1) % ranks], everyone[own - 1]

    def turn(out: torch.Tensor, into: torch.Tensor) -> None:
        ends = [dist.P2POp(dist.isend, out, after, group)] if out.numel() else []
        ends += [dist.P2POp(dist.irecv, into, before, group)] if into.numel() else []
        for handle in dist.batch_isend_irecv(ends) if ends else ():
            handle.wait()

    for step in range(ranks - 1):
        mine = parts[(own - step - 1) % ranks]
        turn(parts[(own - step) % ranks], arrived[: mine.numel()])
        mine.add_(arrived[: mine.numel()])
    for step in range(ranks - 1):
        turn(parts[(own - step + 1) % ranks], parts[(own - step) % ranks])


def sum_fused(tensors: Sequence[torch.Tensor], group: Any = None, *, fusion: int = FUSION) -> None:
    """Sum tensors of one dtype over the ranks, in place and in this order, those that fit the buffer together in one ring."""
    for some in fused([t.numel() * t.element_size() for t in tensors], fusion):
        buffer = torch.cat([tensors[i].reshape(-1) for i in some])
        ring_all_reduce(buffer, group)
        for i, total in zip(some, buffer.split([tensors[i].numel() for i in some]), strict=True):
            tensors[i].copy_(total.view(tensors[i].shape))


def fused(sizes: Sequence[int], limit: int = FUSION) -> list[list[int]]:
    """Numbers of the tensors that share a buffer, in order; one that is larger than the buffer goes alone."""
    groups: list[list[int]] = []
    filled = limit + 1
    for number, size in enumerate(sizes):
        if filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size
    return groups


@dataclass(frozen=True, slots=True)
class RingSum:
    """Tensors that are summed together, and when; the same on every rank."""

    tensors: tuple[int, ...]
    start: float
    end: float


def negotiated(
    ready: Sequence[Sequence[float]],
    sizes: Sequence[int],
    *,
    network: Network = ASSUMED,
    fusion: int = FUSION,
    cycle: float = CYCLE,
) -> list[RingSum]:
    """The sums of a step, simulated. `ready`: for each rank, the moment at which it has each tensor; `sizes`: their bytes.

    At every tick the coordinator knows what all ranks have. It lets them sum that in the order in which it was complete, as
    many at a time as the buffer holds; ticks are a cycle apart, or later, when the sums of the one before are over.
    """
    if not ready or any(len(moments) != len(sizes) for moments in ready):
        raise InvalidInput(f"there are {len(sizes)} tensors, and not as many moments for every rank", hint="one list per rank")
    complete = [max(moments) for moments in zip(*ready, strict=True)]
    left = sorted(range(len(sizes)), key=lambda number: (complete[number], number))
    found: list[RingSum] = []
    tick = 0.0
    while left:
        tick += cycle
        due = [number for number in left if complete[number] <= tick]
        left = left[len(due) :]
        for some in fused([sizes[number] for number in due], fusion):
            numbers = tuple(due[i] for i in some)
            nbytes = sum(sizes[number] for number in numbers)
            seconds = collective_seconds("all_reduce", nbytes, [MeshDim(name="dp", size=len(ready), network=network)])
            found.append(RingSum(numbers, tick, tick + seconds))
            tick += seconds
    return found
