"""A second moment as its row means and column means: the best product of a row and a column for it (Adafactor).

Tensors of more than two dimensions are factored over the last two. Vectors keep the whole moment. Means stand for the paper's
sums; their quotient is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from holdall.optim._math.per_parameter import State


def is_factored(shape: Sequence[int]) -> bool:
    return len(shape) >= 2


def factored_elements(shape: Sequence[int]) -> int:
    """The number of elements in the factored moment of a tensor of this shape."""
    if not is_factored(shape):
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def make_factors(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero means: rows (..., n, 1) and columns (..., 1, m)."""
    *batch, n, m = like.shape
    return like.new_zeros(*batch, n, 1), like.new_zeros(*batch, 1, m)


def average_factors(row: torch.Tensor, col: torch.Tensor, square: torch.Tensor, beta: float) -> None:
    """Update the running means with those of `square`."""
    row.mul_(beta).add_(square.mean(dim=-1, keepdim=True), alpha=1 - beta)
    col.mul_(beta).add_(square.mean(dim=-2, keepdim=True), alpha=1 - beta)


def divide_by_root(x: torch.Tensor, row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
    """x over the root of the factored moment; one new tensor of its size."""
    return torch.mul((row / row.mean(dim=-2, keepdim=True)).rsqrt_(), col.rsqrt()).mul_(x)


def factored_direction(grad: torch.Tensor, state: State, *, beta: float, eps: float) -> torch.Tensor:
    """Adafactor's unclipped direction G / sqrt(V), its moment kept in `state`; takes one tensor of the gradient's size."""
    square = grad.square().add_(eps)
    if is_factored(grad.shape):
        if "row_var" not in state:
            state["row_var"], state["col_var"] = make_factors(grad)
        average_factors(state["row_var"], state["col_var"], square, beta)
        del square
        return divide_by_root(grad, state["row_var"], state["col_var"])
    if "variance" not in state:
        state["variance"] = torch.zeros_like(grad)
    variance: torch.Tensor = state["variance"]
    variance.mul_(beta).add_(square, alpha=1 - beta)
    return torch.rsqrt(variance, out=square).mul_(grad)
