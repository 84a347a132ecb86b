"""HO-Ring, PaRO's hierarchical overlapping ring (arXiv 2310.06003): a schedule of messages, and collectives that run by it.

Ranks are in n groups of m; rank (j, i) is member i of group j. An all-gather moves each rank's chunk to all others:

    across   members of equal number form a ring over the groups: n - 1 messages of one chunk, m rings at once
    inside   the chunk that came in the message before (at first, a rank's own) goes round its group: m - 1 messages

Both use links of their own, so message t across overlaps the round inside of what came in message t - 1; the round of the last
chunks overlaps nothing. A plain ring over all ranks has n m - 1 messages, each as slow as its slowest hop. A reduce-scatter is
the same backwards: whoever sent a chunk receives its sum, and adds its own.

`HORingGather` and `HORingReduce` are for torch's engine on a mesh of nodes (`shard="horing"`), by sends and receives alone.
NCCL has trees and rings of its own; nothing was measured against those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdall.errors import Unsupported
from holdall.parallel.sharding.hierarchical import HierarchicalGather, HierarchicalReduce
from holdall.types.trace import Seconds


class Message(NamedTuple):
    phase: int
    link: str  # "across" or "inside"
    turn: int  # those of a phase and a link follow each other by their turns
    source: int
    target: int
    chunk: int  # the number of the rank that it came from first


@dataclass(frozen=True, slots=True, kw_only=True)
class HORing:
    groups: int
    members: int

    @property
    def ranks(self) -> int:
        return self.groups * self.members

    def all_gather(self) -> list[Message]:
        """All messages, in an order in which each can be sent. Phase t has message t across, and the round inside of what came
        in phase t - 1."""
        n, m, made = self.groups, self.members, []
        for phase in range(n):
            for rank in range(self.ranks):
                j, i = divmod(rank, m)
                if phase < n - 1:  # the chunk that came from `phase` groups back goes on to the next group
                    made.append(Message(phase, "across", 0, rank, (j + 1) % n * m + i, (j - phase) % n * m + i))
                for turn in range(m - 1):
                    chunk = (j - phase) % n * m + (i - turn) % m
                    made.append(Message(phase, "inside", turn, rank, j * m + (i + 1) % m, chunk))
        return sorted(made)

    def reduce_scatter(self) -> list[Message]:
        """The messages of an all-gather, backwards: `chunk` is the rank that its sum is for."""
        back = [Message(-m.phase, m.link, -m.turn, m.target, m.source, m.chunk) for m in self.all_gather()]
        return sorted(back)

    def seconds(self, across: Seconds, inside: Seconds) -> Seconds:
        """Of an all-gather, where a message takes this long on each kind of link."""
        n, m = self.groups, self.members
        return (n - 1) * max(across, (m - 1) * inside) + (m - 1) * inside

    def ring_seconds(self, across: Seconds, inside: Seconds) -> Seconds:
        """Of the plain ring: every message waits for the slowest hop, which joins groups if there are several."""
        slowest = max(across, inside) if self.groups > 1 else inside
        return (self.ranks - 1) * slowest


class _Turn(NamedTuple):
    """What a rank does at once on one kind of link: chunks that it sends and receives, and whom."""

    out: Message
    into: Message


def _turns(messages: list[Message], rank: int) -> Iterator[tuple[list[_Turn], list[_Turn]]]:
    """Phase by phase: (what crosses from group to group, the round inside) of a rank; the two may overlap."""
    for _, phase in groupby(messages, key=lambda m: m.phase):
        some = list(phase)
        out = sorted((m for m in some if m.source == rank), key=lambda m: m.turn)
        into = sorted((m for m in some if m.target == rank), key=lambda m: m.turn)
        across, inside = (
            [_Turn(a, b) for a, b in zip([m for m in out if m.link == link], [m for m in into if m.link == link], strict=True)]
            for link in ("across", "inside")
        )
        yield across, inside


class _Links:
    """Sends and receives of a rank on a mesh of nodes."""

    def __init__(self, across: Any, inside: Any) -> None:
        self.ring = HORing(groups=across.size(), members=inside.size())
        self._groups = {"across": across, "inside": inside}
        self.rank = across.rank() * inside.size() + inside.rank()

    def begin(self, turn: _Turn, out: torch.Tensor, into: torch.Tensor) -> list[Any]:
        group = self._groups[turn.out.link]
        m = self.ring.members
        there, here = (divmod(r, m)[turn.out.link == "inside"] for r in (turn.out.target, turn.into.source))
        to, source = (dist.get_global_rank(group, r) for r in (there, here))
        ends = [dist.P2POp(dist.isend, out, to, group), dist.P2POp(dist.irecv, into, source, group)]
        return list(dist.batch_isend_irecv(ends))


class HORingGather(HierarchicalGather):
    def _gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        links = _Links(self.across, self.inside)
        chunks = whole.view(links.ring.ranks, -1)
        chunks[links.rank].copy_(own)
        for across, inside in _turns(links.ring.all_gather(), links.rank):
            waiting = [w for turn in across for w in links.begin(turn, chunks[turn.out.chunk], chunks[turn.into.chunk])]
            for turn in inside:
                for work in links.begin(turn, chunks[turn.out.chunk], chunks[turn.into.chunk]):
                    work.wait()
            for work in waiting:
                work.wait()


class HORingReduce(HierarchicalReduce):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ARG002
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise Unsupported("HO-Ring reduces gradients to sums or means", hint="leave gradient_divide_factor alone")
        links = _Links(self.across, self.inside)
        sums = input_tensor.clone().view(links.ring.ranks, -1)
        far, near = torch.empty_like(sums[0]), torch.empty_like(sums[0])
        for across, inside in _turns(links.ring.reduce_scatter(), links.rank):
            waiting = [(turn, links.begin(turn, sums[turn.out.chunk], far)) for turn in across]
            for turn in inside:
                for work in links.begin(turn, sums[turn.out.chunk], near):
                    work.wait()
                sums[turn.into.chunk].add_(near)
            for turn, works in waiting:
                for work in works:
                    work.wait()
                sums[turn.into.chunk].add_(far)
        output_tensor.copy_(sums[links.rank])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(links.ring.ranks)
