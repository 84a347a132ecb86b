"""Applies ops that select or rearrange rows of logits `[..., V]` to the hidden rows `[..., H]` instead.

Each function takes the logits, of which it uses the shape alone, and the op's other arguments. It returns the op to apply to
the hidden rows, or None if the op changes the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

Take = Callable[[Tensor], Tensor]


def _reshape(logits: Tensor, args: Any, kwargs: Any) -> Take | None:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or not sizes or not all(isinstance(n, int) for n in sizes):
        return None
    *lead, last = sizes
    vocab = logits.shape[-1]
    if last != vocab and not (last == -1 and prod(lead) * vocab == logits.numel()):
        return None
    return lambda hidden: hidden.reshape(*lead, hidden.shape[-1])


def _flatten(logits: Tensor, args: Any, kwargs: Any) -> Take | None:
    start, end = _ends(*args, **kwargs)
    if (end + logits.dim() if end < 0 else end) >= logits.dim() - 1:
        return None
    return lambda hidden: hidden.flatten(start, end)


def _ends(start_dim: int = 0, end_dim: int = -1) -> tuple[int, int]:
    return start_dim, end_dim


def _index(logits: Tensor, args: Any, kwargs: Any) -> Take | None:
    key = args[0] if isinstance(args[0], tuple) else (args[0],)
    if kwargs or not _leaves_last(key, logits.dim()):
        return None
    return lambda hidden: hidden[key]


def _leaves_last(key: tuple[Any, ...], dims: int) -> bool:
    """Does an index keep the last dimension whole?"""
    taken, dots = 0, 0
    for item in key:
        if item is Ellipsis:
            dots += 1
        elif isinstance(item, Tensor) and item.dtype == torch.bool and item.dim():
            taken += item.dim()
        elif type(item) in (slice, int) or (isinstance(item, Tensor) and item.dtype == torch.int64):
            taken += 1
        else:
            return False
    reaches_last = taken == dims or (dots > 0 and key[-1] is not Ellipsis)
    return dots < 2 and taken <= dims and (not reaches_last or (isinstance(key[-1], slice) and key[-1] == slice(None)))


TAKES: dict[Any, Callable[[Tensor, Any, Any], Take | None]] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    Tensor.__getitem__: _index,
}
