"""Attention that looks back over a window of positions, as in Mistral, Qwen and Gemma, where ranks have the sequence in parts.

A model makes its mask for the positions that it sees, which are a rank's own: that mask says nothing of the others', and there
is none while a rank's part is within the window. So the window is taken from the module, and of each mask it is only asked
whether it is the window's.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from holdall.errors import Unsupported
from holdall.parallel.parts import is_traced

_FEWEST = 128  # queries that are treated together


def window_of(module: torch.nn.Module | None, positions: int) -> int:
    """The window of a module's attention in a sequence of so many positions: its `sliding_window` or, as in Mistral, that of
    its config. 0: it looks at all of them."""
    config = getattr(module, "config", None)
    size = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return size if isinstance(size, int) and 0 < size < positions else 0


def is_window(mask: torch.Tensor, size: int) -> bool:
    """Is it the mask of a window of this size, over a rank's part? A fake one of its shape is taken to be."""
    length = mask.shape[-1]
    if mask.shape[-2] != length or mask.dtype is not torch.bool:
        return False
    if is_traced():
        return True
    parts = enumerate(mask.split(_FEWEST, -2))
    same = [(m == look_back(_FEWEST * n, _FEWEST * n + m.shape[-2], 0, length, size, m.device)).all() for n, m in parts]
    return bool(torch.stack(same).all())


def look_back(begin: int, end: int, first: int, last: int, size: int, device: torch.device) -> torch.Tensor:
    """Which of the positions `first` to `last` those from `begin` to `end` look at."""
    rows, columns = torch.arange(begin, end, device=device).unsqueeze(1), torch.arange(first, last, device=device)
    return (columns <= rows) & (columns > rows - size)


def attend_in_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, scale: float) -> torch.Tensor:
    """Causal attention in which each position sees itself and the `size - 1` before it: some queries at a time, with the keys
    that they see, so that no mask is as large as the square of the sequence."""
    length, step = q.shape[2], max(size, _FEWEST)
    gqa, found = q.shape[1] != k.shape[1], []
    for begin in range(0, length, step):
        end, first = min(begin + step, length), max(0, begin - size + 1)
        mask = look_back(begin, end, first, end, size, q.device)
        parts = q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end]
        found.append(F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=gqa))
    return torch.cat(found, 2) if len(found) > 1 else found[0]


def refuse_window(way: str, *, is_causal: bool) -> Unsupported:
    if not is_causal:
        found = "attention looks both ways in a window, and is not divided along the sequence then"
        return Unsupported(found, hint='use mesh={"tp": ...}')
    return Unsupported(
        f'attention looks back over a window, which shard="{way}" does not divide along the sequence',
        hint='use shard="ulysses", or mesh={"tp": ...}',
    )
