"""Weights, activations and gradients of layers in k bits (DoReFa-Net, Zhou et al. 2016, arXiv 1606.06160), emulated.

Weights are squeezed by tanh to [-1, 1] and rounded to 2^k levels (1 bit: the sign times the mean size); activations are cut to
[0, 1] and rounded; gradients are rounded with noise, so that they are right on average. The rounding itself passes gradients
straight through. The first and the last layer keep their precision. Activations keep theirs unless bits are given: the cut to
[0, 1] is meant for networks whose activations are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from holdall.narrow.product import Convolution, Multiplier, plain_product
from holdall.precision._narrow import NarrowProducts

_WHOLE = 32  # bits that mean: as it is


@dataclass(frozen=True, kw_only=True)
class DoReFa(NarrowProducts):
    """Bits of weights, activations and gradients; 32: as they are."""

    weight_bits: int = 8
    activations: int = _WHOLE
    gradients: int = 8

    name: ClassVar[str] = "dorefa"
    what: ClassVar[str] = "weights and gradients of layers in k bits (emulated)"
    ends: ClassVar[bool] = True

    def formats(self) -> Multiplier:
        return Grids(weights=self.weight_bits, activations=self.activations, gradients=self.gradients)


@dataclass(frozen=True, kw_only=True)
class Grids(Multiplier):
    weights: int
    activations: int
    gradients: int

    @property
    def is_off(self) -> bool:
        return min(self.weights, self.activations, self.gradients) >= _WHOLE

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, how: Convolution | None) -> torch.Tensor:
        if self.activations < _WHOLE:
            x = on_grid(x.clamp(0, 1), self.activations)
        y = plain_product(x, self.weight(weight), how)
        return NoisyGradient.apply(y, self.gradients) if self.gradients < _WHOLE else y  # type: ignore[no-untyped-call,no-any-return]

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        if self.weights >= _WHOLE:
            return weight
        if self.weights == 1:
            return Straight.apply(weight, weight.sign() * weight.abs().mean())  # type: ignore[no-untyped-call,no-any-return]
        squeezed = torch.tanh(weight)
        return 2 * on_grid(squeezed / (2 * squeezed.abs().max()) + 0.5, self.weights) - 1


def on_grid(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 to 1, rounded to one of 2^bits; the gradient passes straight through."""
    levels = 2**bits - 1
    return Straight.apply(values, torch.round(values * levels) / levels)  # type: ignore[no-untyped-call,no-any-return]


class Straight(torch.autograd.Function):
    """The second argument, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, instead: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return instead

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # noqa: ARG004
        return grad, None


class NoisyGradient(torch.autograd.Function):
    """Nothing in forward; in backward the gradient of each sample is rounded to k bits with noise."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bits: int) -> torch.Tensor:
        ctx.bits = bits
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return rounded_gradient(grad, ctx.bits), None


def rounded_gradient(grad: torch.Tensor, bits: int) -> torch.Tensor:
    levels = 2**bits - 1
    largest = grad.abs().amax(dim=tuple(range(1, grad.dim())), keepdim=True).clamp(min=1e-12)
    noise = (torch.rand_like(grad) - 0.5) / levels
    onto = (grad / (2 * largest) + 0.5 + noise).clamp(0, 1)
    made: torch.Tensor = 2 * largest * (torch.round(onto * levels) / levels - 0.5)
    return made
