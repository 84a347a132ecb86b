"""Low-rank projection of a matrix and back: the shorter side is projected onto `rank` directions.

A projector is always stored as (rank, short), one direction per row, whichever side it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from holdall.errors import InvalidInput
from holdall.optim._math.per_parameter import Group

_DRAWS = 15  # the next seed is this draw of a generator with the old one


def is_left(shape: torch.Size) -> bool:
    """Are there fewer rows than columns?"""
    return shape[0] < shape[1]


def down(x: torch.Tensor, projector: torch.Tensor, *, left: bool) -> torch.Tensor:
    """(n, m) to (rank, m) where rows are projected, else to (n, rank)."""
    return projector @ x if left else x @ projector.t()


def up(low: torch.Tensor, projector: torch.Tensor, *, left: bool) -> torch.Tensor:
    """Back to (n, m)."""
    return projector.t() @ low if left else low @ projector


def gaussian(seed: int, rank: int, short: int, like: torch.Tensor) -> torch.Tensor:
    """N(0, 1/rank) from the seed alone, so that E[up(down(x))] = x; the global generators are not touched."""
    if like.device.type == "cuda" and not torch.cuda.is_available():  # a trace for another machine: only the shape matters
        return like.new_empty(rank, short)
    generator = torch.Generator(device=like.device).manual_seed(seed)
    drawn = torch.randn(rank, short, generator=generator, device=like.device, dtype=like.dtype).div_(rank**0.5)
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return drawn
    from torch.distributed.tensor import DTensor, Replicate

    # a sharded parameter: every rank draws the same numbers
    return DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=False)


def next_seed(seed: int) -> int:
    """The chain of seeds: the same everywhere, from one number."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, torch.iinfo(torch.int64).max, (_DRAWS,), generator=generator)
    return int(drawn[-1])


def check_matrices(name: str, group: Group) -> None:
    """Raise unless a group with a rank has only matrices whose sides are at least the rank."""
    if group["rank"] is None:
        return
    for p in group["params"]:
        if p.dim() != 2:
            raise InvalidInput(
                f"{name} cannot project a parameter of shape {tuple(p.shape)} to rank {group['rank']}",
                hint="only matrices can have a rank: use the parameter groups of `groups(model, rank=...)`",
            )
        if group["rank"] > min(p.shape):
            raise InvalidInput(
                f"rank {group['rank']} is above the shorter side of a parameter of shape {tuple(p.shape)}",
                hint=f"use at most {min(p.shape)}, or put it into a group without a rank",
            )


def matrix_groups(model: nn.Module, options: dict[str, Any]) -> list[Group]:
    """Two groups: the weights of inner linear layers with the options, everything else without.

    Inner: in a list of blocks, where the model has one; so an output head is not, nor is a weight tied to an embedding, nor a
    matrix with a side below the rank.
    """
    rank = options.get("rank") or 1
    inner = {id(p) for p in _inner_matrices(model) if min(p.shape) >= rank}
    if not inner:
        raise InvalidInput(
            f"this model has no inner matrix for rank {rank}", hint="use a smaller rank, or make groups yourself"
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    low = [p for p in trained if id(p) in inner]
    rest = [p for p in trained if id(p) not in inner]
    return [group for group in ({"params": low, **options}, {"params": rest}) if group["params"]]


def usual_rank(model: nn.Module) -> int:
    """A quarter of the shortest side of the matrices that would be projected."""
    return max(1, min((min(p.shape) for p in _inner_matrices(model)), default=4) // 4)


def _inner_matrices(model: nn.Module) -> Iterator[torch.Tensor]:
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    repeated: list[nn.Module] = [
        m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential, nn.TransformerEncoder))
    ]
    for block in repeated or [model]:
        for module in block.modules():
            if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
                yield module.in_proj_weight
            # Hugging Face's Conv1D is a linear layer too
            linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            if linear and isinstance(module.weight, torch.Tensor) and id(module.weight) not in embedded:
                yield module.weight
