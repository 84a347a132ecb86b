"""Attention with keys and values that stay where they are: queries are gathered and taken in small portions, and the softmax is
over all ranks (MQSP, micro-query sequence parallelism, ICLR 2023 submission).

Of n positions over p ranks, in m portions of queries, a map of n/m x n/p weights is alive at a time, and is computed again in
backward from the sums that the softmax had. What is sent does not depend on m.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from holdall.parallel.attention.rings import Ring, gathered, spread
from holdall.parallel.exchanges import all_gather, reduce_scatter


class QueryAttention(torch.autograd.Function):
    """softmax(q k^T scale) v over the whole sequence, for the queries of this rank."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, causal: bool, scale: float, portions: int
    ) -> torch.Tensor:
        queries = all_gather(q, 2, ring.group)
        out, sums = torch.empty_like(queries), queries.new_empty(queries.shape[:-1])
        for rows in _portions(queries, portions):
            scores = _scores(queries, k, rows, ring, causal, scale)
            sums[:, :, rows] = _over_ranks(scores.logsumexp(-1), ring)
            out[:, :, rows] = scores.sub_(sums[:, :, rows].unsqueeze(-1)).exp_() @ spread(v, q)
            del scores
        out = reduce_scatter(out, 2, ring.group)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.given = ring, causal, scale, portions
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, sums = ctx.saved_tensors
        ring, causal, scale, portions = ctx.given
        dots = all_gather((grad * out).sum(-1), 2, ring.group)
        queries, grads = all_gather(q, 2, ring.group), all_gather(grad, 2, ring.group)
        dq, dk, dv = torch.empty_like(queries), torch.zeros_like(k), torch.zeros_like(v)
        for rows in _portions(queries, portions):
            weights = _scores(queries, k, rows, ring, causal, scale).sub_(sums[:, :, rows].unsqueeze(-1)).exp_()
            some = grads[:, :, rows]
            dv.add_(gathered(weights.transpose(-1, -2) @ some, dv))
            inner = (some @ spread(v, q).transpose(-1, -2)).sub_(dots[:, :, rows].unsqueeze(-1)).mul_(weights).mul_(scale)
            dq[:, :, rows] = inner @ spread(k, q)
            dk.add_(gathered(inner.transpose(-1, -2) @ queries[:, :, rows], dk))
            del weights, inner
        return reduce_scatter(dq, 2, ring.group), dk, dv, None, None, None, None


def _portions(queries: torch.Tensor, portions: int) -> list[slice]:
    size = -(-queries.shape[2] // portions)
    return [slice(begin, begin + size) for begin in range(0, queries.shape[2], size)]


def _scores(queries: torch.Tensor, k: torch.Tensor, rows: slice, ring: Ring, causal: bool, scale: float) -> torch.Tensor:
    some = queries[:, :, rows]
    scores = (some @ spread(k, queries).transpose(-1, -2)).mul_(scale)
    if causal:
        at = torch.arange(rows.start, rows.start + some.shape[2], device=k.device).unsqueeze(1)
        keys = torch.arange(k.shape[2], device=k.device) + ring.rank * k.shape[2]
        scores.masked_fill_(keys > at, float("-inf"))
    return scores


def _over_ranks(sums: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Logs of sums over all ranks of what each has the log of a sum of."""
    top = sums.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=ring.group)
    total = sums.sub_(top).exp_()
    dist.all_reduce(total, group=ring.group)
    return total.log_().add_(top)
