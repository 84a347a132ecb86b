"""A product of a layer, y = x W + b, with operands in the formats of a recipe, and its two gradients.

Backward has what forward computed with: the input is saved as its codes and scales, and widened again there; not at all if the
weight is frozen. The weight is saved as it is, since the model holds it anyway, and rounded again. Codes are exact numbers, so
a product of widened operands, summed in float32, is what a kernel for that format computes, up to the order of the sum.
Gradients pass the rounding straight through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from holdall.narrow.casts import largest, narrow8, narrow8_both, turn8
from holdall.narrow.formats import Float8, Format, Parts, rounded
from holdall.narrow.kernels import MULTIPLE, can_scale, parts_of, scaled_product


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
        if how is None and is_for_kernels(x, weight, self):
            return ScaledProduct.apply(x, weight, self)  # type: ignore[no-untyped-call, no-any-return]
        return Product.apply(x, weight, self, how)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """The arguments of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def is_for_kernels(x: torch.Tensor, weight: torch.Tensor, formats: Formats) -> bool:
    """Are all three products 8-bit floats with one scale a tensor, on a GPU that multiplies them?"""
    of = (formats.input, formats.weight, formats.grad_input, formats.grad_weight)
    if not all(isinstance(f, Float8) and not f.rows for f in of) or formats.grad_input != formats.grad_weight:
        return False
    rows = x.numel() // max(1, x.shape[-1])
    return rows % MULTIPLE == 0 and can_scale(weight, weight, formats.input, formats.weight)


class ScaledProduct(torch.autograd.Function):
    """Three products by the GPU's kernel. Each operand is read twice, for its largest value and for its codes.

    A kernel wants both operands along the dimension that it sums over, so inputs and gradients have a transposed copy too, from
    the same read; of an input it is what backward keeps. Of the weight forward keeps the scale: backward casts it anew, since
    its codes would be held as long as the graph.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, formats: Formats) -> torch.Tensor:
        of_x, of_w = formats.input, formats.weight
        assert isinstance(of_x, Float8) and isinstance(of_w, Float8)
        ctx.formats, ctx.shape = formats, x.shape
        flat = x.reshape(-1, x.shape[-1])
        most = largest(flat)
        kept: Parts = ()
        if ctx.needs_input_grad[1] and formats.saved:
            codes, turned, _, unit = narrow8_both(flat, most, of_x.dtype, powers=of_x.powers)
            kept = (turned, unit)
        else:
            codes, scale, unit = narrow8(flat, most, of_x.dtype, powers=of_x.powers)
            kept = (flat, scale) if ctx.needs_input_grad[1] else ()
        of_weight, scale_w, unit_w = narrow8(weight, largest(weight), of_w.dtype, powers=of_w.powers)
        ctx.save_for_backward(weight, scale_w, *kept)
        y = scaled_product((codes, unit), (of_weight, unit_w), x.dtype, fast=True)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        formats: Formats = ctx.formats
        form, of_x, of_w = formats.grad_input, formats.input, formats.weight
        assert isinstance(form, Float8) and isinstance(of_x, Float8) and isinstance(of_w, Float8)
        weight, scale_w, *kept = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        most = largest(flat)
        dx = dw = None
        if not ctx.needs_input_grad[1]:
            codes, _, unit = narrow8(flat, most, form.dtype, powers=form.powers)
        else:
            codes, turned, _, unit = narrow8_both(flat, most, form.dtype, powers=form.powers)
        if ctx.needs_input_grad[0]:
            right = (turn8(weight, scale_w, of_w.dtype), scale_w.reciprocal())
            dx = scaled_product((codes, unit), right, grad.dtype).reshape(ctx.shape)
            del right
        del codes
        if ctx.needs_input_grad[1]:
            x, number = kept
            right = (x, number) if formats.saved else (turn8(x, number, of_x.dtype), number.reciprocal())
            dw = scaled_product((turned, unit), right, grad.dtype).to(weight.dtype)
        return dx, dw, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, formats: Formats, how: Convolution | None) -> torch.Tensor:
        ctx.formats, ctx.how, ctx.shape, ctx.dtype = formats, how, x.shape, x.dtype
        flat = x.reshape(-1, x.shape[-1]) if how is None else x
        ctx.flat = flat.shape
        is_scaled = how is None and can_scale(flat, weight, formats.input, formats.weight)
        parts = (flat,) if formats.input is None else _parts(formats.input, flat, is_scaled=is_scaled)
        ctx.is_saved = formats.saved and formats.input is not None
        kept = parts if ctx.is_saved else (flat,)
        ctx.save_for_backward(weight, *(kept if ctx.needs_input_grad[1] else ()))
        if is_scaled:
            assert isinstance(formats.weight, Float8)
            y = scaled_product(parts, parts_of(formats.weight, weight), x.dtype, fast=True)
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
        return scaled_product(parts_of(form, grad), parts_of(turned, weight.t()), grad.dtype)
    g, w = _in(form, grad, -1), _in(turned, weight, 0)
    if ctx.how is None:
        return g @ w
    return _backward_of(ctx.how, g, None, w, ctx.flat)


def _weight_gradient(
    ctx: Any, formats: Formats, grad: torch.Tensor, parts: list[torch.Tensor], weight: torch.Tensor
) -> torch.Tensor:
    form, of_grad = formats.input, formats.grad_weight
    whole = ctx.is_saved and form is not None and not form.is_blockwise  # one scale: its codes serve in this product too
    x = form.widen(parts, ctx.flat, -1) if ctx.is_saved and form is not None else parts[0]
    if of_grad is None:  # a product in the dtype of the layer
        g, x = grad, x.to(grad.dtype)
    else:
        g, x = rounded(of_grad, grad, 0), x.float()
        if form is not None and not whole:
            x = rounded(form, x, 0)  # blocks lie along the rows in this product
    return g.t() @ x if ctx.how is None else _backward_of(ctx.how, g, x, weight.to(g.dtype), ctx.flat)


def _parts(form: Format, values: torch.Tensor, *, is_scaled: bool) -> Parts:
    return parts_of(form, values) if is_scaled and isinstance(form, Float8) else form.narrow(values, -1)


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
