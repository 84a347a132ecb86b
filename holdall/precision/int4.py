"""Products of layers in INT4, emulated (Xi et al., "Training Transformers with 4-bit Integers", 2023, arXiv 2306.11987).

Forward: inputs and weights are turned by a block-diagonal Hadamard matrix, which spreads outliers, and rounded to 4 bits;
backward keeps those 4 bits. Backward: the gradient is split in two 4-bit parts, high and low (bit splitting), and of the
twice as many rows as many as there were are kept, by chance: the more likely the more they count (leverage-score sampling),
divided by that chance. The grid's step is that which LSQ starts from; it is not learnt as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from holdall.narrow.formats import Integer
from holdall.narrow.hadamard import block_of, turn
from holdall.narrow.product import Convolution, Multiplier
from holdall.precision._narrow import NarrowProducts

_FOUR = Integer(bits=4)
_BY_CHANCE = Integer(bits=4, stochastic=True)
_ROUNDS = 8  # of making the chances add up


@dataclass(frozen=True, kw_only=True)
class Int4(NarrowProducts):
    """`block`: rows of a Hadamard block, a power of two. `sampling`: of the split gradient; False: all rows are used."""

    block: int = 32
    sampling: bool = True

    name: ClassVar[str] = "int4"
    what: ClassVar[str] = "products of linear layers in INT4 (emulated)"
    convolutions: ClassVar[bool] = False

    def formats(self) -> Multiplier:
        return Int4Products(block=self.block, sampling=self.sampling)


@dataclass(frozen=True, kw_only=True)
class Int4Products(Multiplier):
    block: int
    sampling: bool

    @property
    def is_off(self) -> bool:
        return False

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, how: Convolution | None) -> torch.Tensor:
        assert how is None
        made: torch.Tensor = _Product.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, by: Int4Products) -> torch.Tensor:
        ctx.by, ctx.shape, ctx.dtype = by, x.shape, x.dtype
        flat = turn(x.reshape(-1, x.shape[-1]).float(), block_of(x.shape[-1], by.block))
        ctx.flat = flat.shape
        parts = quantised(flat)
        ctx.save_for_backward(weight, *parts)
        y = _FOUR.widen(parts, flat.shape) @ _turned_weight(weight, by).t()
        return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight, *parts = ctx.saved_tensors
        size = block_of(ctx.flat[-1], ctx.by.block)
        high, low = split(grad.reshape(-1, grad.shape[-1]).float())
        both = torch.cat([high, low])
        sizes = torch.linalg.vector_norm(both, dim=1)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            kept = sampled(both, sizes) if ctx.by.sampling else both
            up, down = kept.chunk(2)
            dx = turn((up + down) @ _turned_weight(weight, ctx.by), size).reshape(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            x = _FOUR.widen(parts, ctx.flat)
            lengths = torch.linalg.vector_norm(x, dim=1)
            kept = sampled(both, sizes * torch.cat([lengths, lengths])) if ctx.by.sampling else both
            up, down = kept.chunk(2)
            dw = turn((up + down).t() @ x, size).to(weight.dtype)
        return dx, dw, None


def _turned_weight(weight: torch.Tensor, by: Int4Products) -> torch.Tensor:
    turned = turn(weight.float(), block_of(weight.shape[1], by.block))
    return _FOUR.widen(quantised(turned), turned.shape)


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """4 bits with the step that LSQ starts from: 2 mean |x| / sqrt(7)."""
    unit = (2 * values.abs().mean() / _FOUR.most**0.5).clamp(min=1e-12)
    return _FOUR.in_units(values, unit)


def split(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A high part on a coarse grid of 4 bits, and a low one of what is left, rounded by chance: right on average."""
    parts = _FOUR.narrow(grad)
    high = _FOUR.widen(parts, grad.shape)
    rest = grad - high
    unit = (parts[1] / (2 * _FOUR.most)).clamp(min=1e-12)  # what is left is at most half a step of the high part
    return high, _BY_CHANCE.widen(_BY_CHANCE.in_units(rest, unit), grad.shape)


def chances(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Chances of at most 1 that add up to `count`, in proportion to the weights below 1."""
    found = torch.zeros_like(weights)
    for _ in range(_ROUNDS):
        is_sure = found >= 1
        free = torch.where(is_sure, torch.zeros_like(weights), weights)
        left = count - is_sure.sum()
        found = torch.where(is_sure, torch.ones_like(found), free * (left / free.sum().clamp(min=1e-30)))
    return found.clamp(max=1)


def sampled(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Half of the rows on average, the others zero; the mean is the rows themselves."""
    chance = chances(weights, rows.shape[0] // 2)
    is_kept = torch.rand_like(chance) < chance
    factor = torch.where(is_kept, chance.clamp(min=1e-30).reciprocal(), torch.zeros_like(chance))
    return rows * factor[:, None]
