"""Bytes and seconds of collectives over groups of ranks: the alpha-beta model of rings (Thakur et al., 2005).

A collective works on a buffer of X bytes: what an all-gather gives, a reduce-scatter takes, an all-reduce sums. Over a group
of n ranks, a ring has n - 1 messages of X / n bytes from every rank to the next; an all-reduce is a reduce-scatter and an all-
gather. A shift sends all X bytes to the next rank of a ring. Over several dimensions of a mesh, the slow ones carry only the
part that the fast ones leave to each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdall.errors import unknown_name
from holdall.types.mesh import MeshDim
from holdall.types.trace import Bytes, Seconds

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "shift")


def sent_bytes(kind: str, nbytes: Bytes, ranks: int) -> Bytes:
    """Bytes that one rank sends in a collective over a buffer of `nbytes`; the mean of the ranks where they differ."""
    _check(kind)
    if kind == "shift":
        return nbytes if ranks > 1 else 0
    part = nbytes * (ranks - 1) // ranks
    return 2 * part if kind == "all_reduce" else part


def messages(kind: str, ranks: int) -> int:
    """Messages that follow each other."""
    _check(kind)
    if kind == "shift":
        return min(1, ranks - 1)
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def collective_seconds(kind: str, nbytes: Bytes, dims: Sequence[MeshDim]) -> Seconds:
    """Of one collective over the ranks of these dimensions, slowest network first, as in a mesh."""
    _check(kind)
    if len(dims) == 1:
        (dim,) = dims
        return messages(kind, dim.size) * dim.network.latency + sent_bytes(kind, nbytes, dim.size) / dim.network.rate
    *slow, fast = dims
    if kind == "all_reduce":
        inside = sum(collective_seconds(half, nbytes, [fast]) for half in ("reduce_scatter", "all_gather"))
        return inside + collective_seconds(kind, nbytes // fast.size, slow)
    across = nbytes if kind in ("all_to_all", "broadcast", "shift") else nbytes // fast.size
    return collective_seconds(kind, nbytes, [fast]) + collective_seconds(kind, across, slow)


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise unknown_name("collective", kind, KINDS)
