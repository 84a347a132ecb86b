"""Packs the tensors of a unit into one flat buffer, so that one copy moves them all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from holdall.types.layout import ALIGN, round_up

Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # (shape, stride, dtype)


def like(t: torch.Tensor, dtype: torch.dtype | None = None) -> Like:
    """The pattern of a dense tensor; for any other, the same shape, contiguous."""
    with torch._C._DisableTorchDispatch():
        return tuple(t.shape), tuple(torch.empty_like(t, device="meta").stride()), dtype or t.dtype


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of tensors with given patterns in one flat buffer."""

    places: tuple[tuple[int, Like], ...]  # offset in bytes
    nbytes: int

    @staticmethod
    def of(patterns: Iterable[Like]) -> Layout:
        places, end = [], 0
        for pattern in patterns:
            places.append((end, pattern))
            size = pattern[2].itemsize * math.prod(pattern[0])
            end = round_up(end + size, ALIGN)
        return Layout(tuple(places), end)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in `memory`, a byte buffer of at least that length. Hidden from dispatch modes."""
        storage, start = memory.untyped_storage(), memory.storage_offset()
        found = []
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for offset, (shape, stride, dtype) in self.places:
                empty = torch.empty(0, dtype=dtype, device=memory.device)
                found.append(empty.set_(storage, (start + offset) // dtype.itemsize, shape, stride))
        return found
