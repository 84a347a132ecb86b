"""Causal attention over contiguous parts of a sequence with equal work on all ranks (DISTFLASHATTN, arXiv 2310.03294).

In step t, rank r computes its own queries on the keys of rank r - t. The first t ranks have none to compute: they help the
last ones, whose queries they compute on their own keys, and give the results back. So n / 2 + 1 steps do what takes a plain
ring n, and half of the ranks are idle in the last of them. Every message is what a rank itself has, or a result for its owner.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import Unsupported
from holdall.parallel.attention.rings import Ring, merge, tile, tile_backward

Tile = tuple[int, int]  # rank of the queries, rank of the keys


def schedule(ranks: int) -> list[list[Tile | None]]:
    """The tile that each rank computes in each step; None: it is idle."""
    if ranks % 2:
        raise Unsupported(f"the balanced schedule is for even numbers of ranks, not {ranks}", hint='use shard="zigzag"')
    return [[_tile(r, t, ranks) for r in range(ranks)] for t in range(ranks // 2 + 1)]


def _tile(rank: int, step: int, ranks: int) -> Tile | None:
    if rank >= step:
        return rank, rank - step
    return (rank - step + ranks, rank) if 2 * step < ranks else None


class BalancedAttention(torch.autograd.Function):
    """softmax(q k^T scale) v of a causal model, for the queries of this rank."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, scale: float) -> torch.Tensor:
        out, lse = tile(q, k, v, True, scale)
        for step in range(1, ring.ranks // 2 + 1):
            calls = _Calls(ring, step)
            got = calls.ask([k, v], [q], (k, v), (q,))
            result = None
            if calls.computes_own:
                far_k, far_v = got
                merge(out, lse, *tile(q, far_k, far_v, False, scale))
            elif calls.helps:
                result = list(tile(got[0], k, v, False, scale))
            back = calls.answer(result if calls.helps else None, (out, lse) if calls.is_helped else None)
            if back:
                merge(out, lse, *back)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        dots = (grad * out).sum(-1)
        grad = grad.contiguous()
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        tile_backward(q, grad, dq, lse, dots, k, v, dk, dv, True, ctx.scale)
        for step in range(1, ctx.ring.ranks // 2 + 1):
            calls = _Calls(ctx.ring, step)
            got = calls.ask([k, v], [q, grad, lse, dots], (k, v), (q, grad, lse, dots))
            result = None
            if calls.computes_own:
                (far_k, far_v), result = got, [torch.zeros_like(k), torch.zeros_like(v)]
                tile_backward(q, grad, dq, lse, dots, far_k, far_v, result[0], result[1], False, ctx.scale)
            elif calls.helps:
                result = [torch.zeros_like(q)]
                far_q, far_grad, far_lse, far_dots = got
                tile_backward(far_q, far_grad, result[0], far_lse, far_dots, k, v, dk, dv, False, ctx.scale)
            awaited = (k, v) if calls.lends else (q,) if calls.is_helped else None
            back = calls.answer(result, awaited)
            for own, more in zip((dk, dv) if calls.lends else (dq,), back, strict=False):
                own.add_(more)
        return dq, dk, dv, None, None


class _Calls:
    """What a rank does for others in a step, and they for it."""

    def __init__(self, ring: Ring, step: int) -> None:
        last = 2 * step == ring.ranks
        self._group = ring.group
        ranks = dist.get_process_group_ranks(ring.group)
        self._before, self._after = ranks[(ring.rank - step) % ring.ranks], ranks[(ring.rank + step) % ring.ranks]
        self.computes_own = ring.rank >= step
        self.helps = not self.computes_own and not last
        self.lends = ring.rank + step < ring.ranks  # its keys and values, to rank + step
        self.is_helped = not self.lends and not last

    def ask(self, keys: list[Any], queries: list[Any], like_keys: Any, like_queries: Any) -> list[torch.Tensor]:
        """Send keys and values to who needs them, or queries to who helps; returns what comes from the other side."""
        sent = keys if self.lends else queries if self.is_helped else None
        awaited = like_keys if self.computes_own else like_queries if self.helps else None
        return _exchange(sent, self._after, awaited, self._before, self._group)

    def answer(self, results: list[torch.Tensor] | None, awaited: Any) -> list[torch.Tensor]:
        """Give results back to who asked, and get those that were asked for."""
        return _exchange(results, self._before, awaited, self._after, self._group)


def _exchange(sent: list[torch.Tensor] | None, to: int, awaited: Any, source: int, group: Any) -> list[torch.Tensor]:
    flat = None if sent is None else torch.cat([t.flatten() for t in sent])
    like = None if awaited is None else [(t.shape, t.numel()) for t in awaited]
    arriving = None if like is None else awaited[0].new_empty(sum(numel for _, numel in like))
    works = []
    if flat is not None:
        works.append(dist.isend(flat, to, group=group))
    if arriving is not None:
        works.append(dist.irecv(arriving, source, group=group))
    for work in works:
        if work is not None:
            work.wait()
    if arriving is None or like is None:
        return []
    return [part.view(shape) for part, (shape, _) in zip(arriving.split([n for _, n in like]), like, strict=True)]
