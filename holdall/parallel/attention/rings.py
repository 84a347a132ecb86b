"""Attention over a sequence that is divided over ranks: keys and values travel round rings, and results are merged by their
log-sum-exp (ring attention, after Li et al., ACL 2023; two levels of rings after LoongTrain, arXiv 2406.18485).

A rank has one or two pieces of the sequence. With one, contiguous, piece each, the last rank of a causal model has as many
tiles to compute as there are ranks, and the first has one. With pieces r and 2n - 1 - r of 2n ("zigzag") all have equal work.
A tile is the attention of a piece of queries on a piece of keys: all of it where the keys come before, half where it is the
same piece.

Rings of `window` ranks pass keys and values on; between windows, those with which a window began go from rank to rank of the
same place. One window of all ranks is the plain ring. In backward, gradients of keys and values travel with them until they
are home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ring:
    """How a sequence lies over the ranks of a group, and how keys and values travel."""

    group: Any
    rank: int
    ranks: int
    zigzag: bool = False
    window: int = 0  # ranks of an inner ring; 0: all

    @property
    def inner(self) -> int:
        return self.window or self.ranks

    def pieces(self, rank: int) -> tuple[int, ...]:
        """Numbers of the pieces of the sequence that a rank has, in order."""
        return (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)

    def owner(self, outer: int, inner: int) -> int:
        """Whose keys and values are here after so many steps of the outer and the inner ring."""
        windows = self.ranks // self.inner
        window, place = divmod(self.rank, self.inner)
        return (window - outer) % windows * self.inner + (place - inner) % self.inner

    def next_inner(self) -> tuple[int, int]:
        """The ranks to send to, and to receive from."""
        window, place = divmod(self.rank, self.inner)
        return window * self.inner + (place + 1) % self.inner, window * self.inner + (place - 1) % self.inner

    def next_outer(self) -> tuple[int, int]:
        return (self.rank + self.inner) % self.ranks, (self.rank - self.inner) % self.ranks

    def tiles(self, owner: int, causal: bool) -> list[tuple[int, int, bool]]:
        """(piece of queries, piece of keys, whether it is half masked) to be computed with the keys of a rank; by their places
        in what the two ranks have."""
        return [
            (a, b, causal and q == k)
            for a, q in enumerate(self.pieces(self.rank))
            for b, k in enumerate(self.pieces(owner))
            if not causal or k <= q
        ]


class RingAttention(torch.autograd.Function):
    """softmax(q k^T scale) v over the whole sequence, for the queries of this rank."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, causal: bool, scale: float
    ) -> torch.Tensor:
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
        outs, lses = _cut(out, ring), _cut(lse, ring, -1)
        outer = [k, v]
        for turn in range(ring.ranks // ring.inner):
            across = _Passing(outer, ring, *ring.next_outer()) if turn + 1 < ring.ranks // ring.inner else None
            here = outer
            for step in range(ring.inner):
                along = _Passing(here, ring, *ring.next_inner()) if step + 1 < ring.inner else None
                for a, b, half in ring.tiles(ring.owner(turn, step), causal):
                    keys, values = (_cut(t, ring)[b] for t in here)
                    merge(outs[a], lses[a], *tile(_cut(q, ring)[a], keys, values, half, scale))
                here = along.arrived() if along else here
            outer = across.arrived() if across else outer
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.causal, ctx.scale = ring, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring = ctx.ring
        dots, dq = (grad * out).sum(-1), torch.zeros_like(q)
        mine = [_cut(t, ring) for t in (q, grad, dq)]
        stats = [_cut(t, ring, -1) for t in (lse, dots)]
        outer, outer_sums = [k, v], [torch.zeros_like(k), torch.zeros_like(v)]
        windows = ring.ranks // ring.inner
        for turn in range(windows):
            here, sums = outer, outer_sums if windows == 1 else [torch.zeros_like(k), torch.zeros_like(v)]
            for step in range(ring.inner):
                along = _Passing(here, ring, *ring.next_inner()) if step + 1 < ring.inner else None
                for a, b, half in ring.tiles(ring.owner(turn, step), ctx.causal):
                    keys, values, dk, dv = (_cut(t, ring)[b] for t in (*here, *sums))
                    own_q, own_grad, own_dq, own_lse, own_dots = (pieces[a] for pieces in (*mine, *stats))
                    tile_backward(own_q, own_grad, own_dq, own_lse, own_dots, keys, values, dk, dv, half, ctx.scale)
                here = along.arrived() if along else here
                if ring.inner > 1:
                    sums = _Passing(sums, ring, *ring.next_inner()).arrived()
            if windows > 1:
                outer_sums = [a.add_(b) for a, b in zip(outer_sums, sums, strict=True)]
                if turn + 1 < windows:
                    outer = _Passing(outer, ring, *ring.next_outer()).arrived()
                outer_sums = _Passing(outer_sums, ring, *ring.next_outer()).arrived()
            else:
                outer_sums = sums
        return dq, *outer_sums, None, None, None


class _Passing:
    """Tensors on their way to the next rank, and those of the rank before on theirs to this one."""

    def __init__(self, tensors: Sequence[torch.Tensor], ring: Ring, to: int, source: int) -> None:
        self._like = [(t.shape, t.numel()) for t in tensors]
        self._sent = torch.cat([t.flatten() for t in tensors])
        self._arriving = torch.empty_like(self._sent)
        ranks = dist.get_process_group_ranks(ring.group)
        self._works = [
            dist.isend(self._sent, ranks[to], group=ring.group),
            dist.irecv(self._arriving, ranks[source], group=ring.group),
        ]

    def arrived(self) -> Tensors:
        for work in self._works:
            if work is not None:
                work.wait()
        parts = self._arriving.split([numel for _, numel in self._like])
        return [part.view(shape) for part, (shape, _) in zip(parts, self._like, strict=True)]


def _cut(t: torch.Tensor, ring: Ring, dim: int = -2) -> tuple[torch.Tensor, ...]:
    """The pieces of the sequence, as views."""
    return t.chunk(2, dim) if ring.zigzag else (t,)


def _scores(q: torch.Tensor, keys: torch.Tensor, half: bool, scale: float) -> torch.Tensor:
    scores = (q @ keys.transpose(-1, -2)).mul_(scale)
    if half:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def tile(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, half: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of some queries on some keys, and the log of the sum of its weights."""
    scores = _scores(q, spread(keys, q), half, scale)
    lse = scores.logsumexp(-1)
    return scores.sub_(lse.unsqueeze(-1)).exp_() @ spread(values, q), lse


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Add the attention on further keys, in place."""
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1)).add_(more.mul_((more_lse - both).exp_().unsqueeze(-1)))
    lse.copy_(both)


def tile_backward(
    q: torch.Tensor,
    grad: torch.Tensor,
    dq: torch.Tensor,
    lse: torch.Tensor,
    dots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    half: bool,
    scale: float,
) -> None:
    """Add a tile's gradients to dq, dk and dv."""
    weights = _scores(q, spread(keys, q), half, scale).sub_(lse.unsqueeze(-1)).exp_()
    dv.add_(gathered(weights.transpose(-1, -2) @ grad, dv))
    inner = (grad @ spread(values, q).transpose(-1, -2)).sub_(dots.unsqueeze(-1)).mul_(weights).mul_(scale)
    dq.add_(inner @ spread(keys, q))
    dk.add_(gathered(inner.transpose(-1, -2) @ q, dk))


def spread(t: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Heads of keys or values, each once for every head of queries that reads it."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def gathered(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The reverse for gradients: sums over the heads that read the same."""
    return t if t.shape[1] == like.shape[1] else t.unflatten(1, (like.shape[1], -1)).sum(2)
