"""A product of a layer, y = x W + b, with operands in the formats of a recipe, and its two gradients.

Backward has what forward computed with: the input is saved as its codes and scales, and widened again there. The weight is
saved as it is, since the model holds it anyway, and rounded again. Codes are exact numbers, so a product of widened operands,
summed in float32, is what a kernel for that format computes, up to the order of the sum. Gradients pass the rounding straight
through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from holdall.narrow.formats import Float8, Format, rounded
from holdall.narrow.kernels import can_scale, scaled_product


class Multiplier(Protocol):
    """What a recipe makes of the product of a layer; the same for all its calls, and for copies of the layer."""

    @property
    def is_off(self) -> bool:
        """Is it the plain product?"""
        ...

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, how: Convolution | None) -> torch.Tensor:
        """`how` None: x is (..., in), the weight (out, in)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Formats(Multiplier):
    """A format for each operand; None: it keeps its own dtype.

    `grad_input`, `grad_weight`: the output's gradient in the product for the gradient of the input, of the weight. `saved`:
    the input is saved in its format, not in its own dtype.
    """

    input: Format | None = None
    weight: Format | None = None
    grad_input: Format | None = None
    grad_weight: Format | None = None
    saved: bool = True

    @property
    def is_off(self) -> bool:
        return all(f is None for f in (self.input, self.weight, self.grad_input, self.grad_weight))

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, how: Convolution | None) -> torch.Tensor:
        made: torch.Tensor = Product.apply(x, weight, self, how)  # type: ignore[no-untyped-call]
        return made


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """The arguments of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, formats: Formats, how: Convolution | None) -> torch.Tensor:
        ctx.formats, ctx.how, ctx.shape, ctx.dtype = formats, how, x.shape, x.dtype
        flat = x.reshape(-1, x.shape[-1]) if how is None else x
        ctx.flat = flat.shape
        parts = formats.input.narrow(flat, -1) if formats.input is not None else (flat,)
        is_saved = formats.saved and formats.input is not None
        ctx.save_for_backward(weight, *(parts if is_saved else (flat,)))
        ctx.is_saved = is_saved
        if how is None and can_scale(flat, weight, formats.input, formats.weight):
            assert isinstance(formats.input, Float8) and isinstance(formats.weight, Float8)
            y = scaled_product(parts, formats.weight.narrow(weight, -1), x.dtype)
        else:
            numbers = formats.input.widen(parts, flat.shape, -1) if formats.input is not None else flat.float()
            y = plain_product(numbers, _in(formats.weight, weight, -1), how).to(x.dtype)
        return y.reshape(*x.shape[:-1], weight.shape[0]) if how is None else y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        formats: Formats = ctx.formats
        weight, *parts = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1]) if ctx.how is None else grad
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(ctx, formats, flat, weight).reshape(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(ctx, formats, flat, parts, weight).to(weight.dtype)
        return dx, dw, None, None


def _input_gradient(ctx: Any, formats: Formats, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    form = formats.grad_input
    turned = formats.weight if form is not None else None  # a product in its own dtype has its own weight
    if ctx.how is None and can_scale(grad, weight.t(), form, turned):
        assert isinstance(form, Float8) and isinstance(turned, Float8)
        return scaled_product(form.narrow(grad, -1), turned.narrow(weight.t().contiguous(), -1), grad.dtype)
    g, w = _in(form, grad, -1), _in(turned, weight, 0)
    if ctx.how is None:
        return g @ w
    return _backward_of(ctx.how, g, None, w, ctx.flat)


def _weight_gradient(
    ctx: Any, formats: Formats, grad: torch.Tensor, parts: list[torch.Tensor], weight: torch.Tensor
) -> torch.Tensor:
    form, of_grad = formats.input, formats.grad_weight
    whole = ctx.is_saved and form is not None and not form.is_blockwise  # one scale: its codes serve in this product too
    if whole and ctx.how is None and can_scale(grad.t(), parts[0].t(), of_grad, form):
        assert isinstance(of_grad, Float8)
        codes, unit = of_grad.narrow(grad)
        return scaled_product((codes.t().contiguous(), unit), (parts[0].t().contiguous(), parts[1]), grad.dtype)
    x = form.widen(parts, ctx.flat, -1) if ctx.is_saved and form is not None else parts[0]
    if of_grad is None:  # a product in the dtype of the layer
        g, x = grad, x.to(grad.dtype)
    else:
        g, x = rounded(of_grad, grad, 0), x.float()
        if form is not None and not whole:
            x = rounded(form, x, 0)  # blocks lie along the rows in this product
    return g.t() @ x if ctx.how is None else _backward_of(ctx.how, g, x, weight.to(g.dtype), ctx.flat)


def _in(form: Format | None, values: torch.Tensor, dim: int) -> torch.Tensor:
    return values.float() if form is None else rounded(form, values, dim)


def plain_product(x: torch.Tensor, weight: torch.Tensor, how: Convolution | None) -> torch.Tensor:
    if how is None:
        return x @ weight.t()
    call = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    return call(x, weight, None, how.stride, how.padding, how.dilation, how.groups)  # type: ignore[operator]


def _backward_of(
    how: Convolution, grad: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """The gradient of the input (`x` None) or of the weight."""
    given = x if x is not None else grad.new_empty(shape)
    mask = [x is None, x is not None, False]
    zeros = [0] * len(how.stride)
    made = torch.ops.aten.convolution_backward(
        grad, given, weight, None, how.stride, how.padding, how.dilation, False, zeros, how.groups, mask
    )
    return made[0] if x is None else made[1]  # type: ignore[no-any-return]
