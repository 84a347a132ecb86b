"""HO-Ring, PaRO's hierarchical overlapping ring (arXiv 2310.06003), as a schedule of messages.

Ranks are in n groups of m; rank (j, i) is member i of group j. An all-gather moves each rank's chunk to all others:

    across   members of equal number form a ring over the groups: n - 1 messages of one chunk, m rings at once
    inside   the chunk that came in the message before (at first, a rank's own) goes round its group: m - 1 messages

Both use links of their own, so message t across overlaps the round inside of what came in message t - 1; the round of the last
chunks overlaps nothing. A plain ring over all ranks has n m - 1 messages, each as slow as its slowest hop. A reduce-scatter is
the same backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

    def seconds(self, across: Seconds, inside: Seconds) -> Seconds:
        """Of an all-gather, where a message takes this long on each kind of link."""
        n, m = self.groups, self.members
        return (n - 1) * max(across, (m - 1) * inside) + (m - 1) * inside

    def ring_seconds(self, across: Seconds, inside: Seconds) -> Seconds:
        """Of the plain ring: every message waits for the slowest hop, which joins groups if there are several."""
        slowest = max(across, inside) if self.groups > 1 else inside
        return (self.ranks - 1) * slowest
