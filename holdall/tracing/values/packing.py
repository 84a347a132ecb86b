"""Packs and pads sequences of several lengths by traceable ops: torch's own read the lengths below Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch._pack_padded_sequence`: the sequences, longest first, step by step; and their number at each step."""
    ends: list[int] = lengths.tolist()
    sizes = [sum(end > step for end in ends) for step in range(ends[0])]
    packed: torch.Tensor = _Pack.apply(x, sizes, batch_first)
    return packed, torch.tensor(sizes)


def pad(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch._pad_packed_sequence`: the inverse, and the lengths."""
    sizes: list[int] = batch_sizes.tolist()
    rest = data.shape[1:]
    out = torch.full((max(len(sizes), total), sizes[0], *rest), value, dtype=data.dtype, device=data.device)
    for first, end, size, offset in _runs(sizes):
        out[first:end, :size].copy_(data[offset : offset + (end - first) * size].view(end - first, size, *rest))
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return out.transpose(0, 1) if batch_first else out, lengths


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], batch_first: bool) -> torch.Tensor:
        ctx.shape, ctx.sizes, ctx.batch_first = x.shape, sizes, batch_first
        steps = x.transpose(0, 1) if batch_first else x
        rest = x.shape[2:]
        return torch.cat([steps[first:end, :size].contiguous().view(-1, *rest) for first, end, size, _ in _runs(sizes)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        steps = grad.new_zeros(ctx.shape)
        turned = steps.transpose(0, 1) if ctx.batch_first else steps
        for first, end, size, offset in _runs(ctx.sizes):
            part = grad[offset : offset + (end - first) * size]
            turned[first:end, :size].copy_(part.view(end - first, size, *grad.shape[1:]))
        return steps, None, None


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of steps with the same number of sequences: (first, end, number, offset)."""
    first = offset = 0
    for step in range(1, len(sizes) + 1):
        if step == len(sizes) or sizes[step] != sizes[first]:
            yield first, step, sizes[first], offset
            offset += (step - first) * sizes[first]
            first = step
