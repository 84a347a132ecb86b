"""Hadamard matrices in blocks along the last dimension: orthogonal, symmetric, made of additions."""

from __future__ import annotations

import torch


def block_of(size: int, most: int) -> int:
    """The largest power of two that divides the size, and is at most `most`."""
    block = 1
    while block * 2 <= most and size % (block * 2) == 0:
        block *= 2
    return block


def turn(values: torch.Tensor, block: int) -> torch.Tensor:
    """Each block of the last dimension times the Hadamard matrix of its size, over its root: its own inverse."""
    out = values.unflatten(-1, (-1, block))
    width = 1
    while width < block:
        pairs = out.unflatten(-1, (-1, 2, width))
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack([left + right, left - right], dim=-2).flatten(-3)
        width *= 2
    made: torch.Tensor = (out / block**0.5).flatten(-2)
    return made
