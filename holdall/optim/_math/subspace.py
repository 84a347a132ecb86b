"""The leading singular directions of a matrix, and how a projector made of them is stored."""

from __future__ import annotations

import torch

from holdall.codecs.levels import decode_levels, encode_levels, level_bytes
from holdall.optim._math.per_parameter import State
from holdall.optim._math.projection import gaussian

_COLD, _WARM = 6, 2  # rounds of the iteration from random directions, and from those found before


def leading(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first left and right singular vectors as rows, (rank, n) and (rank, m), by a full SVD, whose temporaries are three
    matrices of full size."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    # own memory: a slice would keep all of u or vh alive
    return u.mT[:rank].clone(memory_format=torch.contiguous_format), vh[:rank].clone(memory_format=torch.contiguous_format)


def leading_left(matrix: torch.Tensor, rank: int, *, begin: torch.Tensor | None, seed: int) -> torch.Tensor:
    """Nearly the first left singular vectors, (rank, n), by rounds of Q <- qr(G (G^T Q)), from `begin` where there is one.

    Takes a few matrices of rank columns rather than an SVD's three of full size.
    """
    found = gaussian(seed, rank, matrix.shape[0], matrix) if begin is None else begin
    for _ in range(_COLD if begin is None else _WARM):
        found = torch.linalg.qr(matrix @ (matrix.mT @ found.mT))[0].mT
    small = found @ matrix  # (rank, m)
    order = torch.linalg.eigh(small @ small.mT)[1].flip(-1)  # the longest first
    ordered: torch.Tensor = order.mT @ found
    return ordered.contiguous()


def projector_bytes(numel: int, bits: int, itemsize: int) -> int:
    return itemsize * numel if bits == 32 else level_bytes(numel, bits)


def write_projector(state: State, key: str, projector: torch.Tensor, *, bits: int) -> None:
    if bits == 32:
        state[key] = projector
        return
    state[key], state[f"{key}_scale"], state[f"{key}_zero"] = encode_levels(projector, bits=bits)


def read_projector(state: State, key: str, rank: int, side: int, like: torch.Tensor, *, bits: int) -> torch.Tensor:
    """(rank, side)."""
    kept: torch.Tensor = state[key]
    if bits != 32:
        numel = rank * side
        kept = decode_levels(kept, state[f"{key}_scale"], state[f"{key}_zero"], bits=bits, numel=numel).to(like.dtype)
    return kept.view(rank, side)
