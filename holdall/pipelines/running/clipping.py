"""Clips gradients by the norm over all stages: torch's function sees those of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from holdall.sharded import is_shard, local_of

PIECE = 1 << 20  # elements that are squared at a time
_TINY = 1e-6  # as in torch's clip_grad_norm_


def clip_over_stages(
    parameters: Sequence[Any], most: float, *, holders: int, again: Mapping[int, int], group: Any
) -> torch.Tensor:
    """Scale gradients so that their norm over the ranks of `group` is `most` or less, and return what it was. `holders`: ranks
    that have each stage, or parts of it; `again`: stages that have a parameter, by its identity, where there are several."""
    found = [p for p in parameters if p.grad is not None]
    device = local_of(parameters[0]).device if parameters else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for p in found:
        grad = local_of(p.grad).detach()
        total = sum((piece.double().square().sum() for piece in grad.flatten().split(PIECE)), start=torch.zeros_like(squares))
        squares += total / (holders * again.get(id(p), 1) / _parts(p.grad))
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = (most / (norm + _TINY)).clamp(max=1.0)
    for p in found:
        local_of(p.grad).mul_(scale.to(p.grad.dtype))
    return norm.float()


def clipping(parameters: Sequence[Any]) -> int:
    """Bytes that it takes to clip their gradients."""
    return 16 * max((min(PIECE, local_of(p).numel()) for p in parameters), default=0)  # float64, and its squares


def _parts(grad: Any) -> int:
    """Ranks among which one whole of it is divided."""
    if not is_shard(grad):
        return 1
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return prod(size for place, size in sizes if not place.is_replicate())
