"""Counts what FP8 loses, layer by layer: values above the format's largest number, to zero, and those that are not finite.

Counters are a buffer of the layer, so that a forward that is repeated counts once, as statistics of batch norms do. Hooks count
beside the product, with its scales; that costs a few passes over each operand and float32 temporaries, which a plan counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from holdall.narrow.casts import choose_scale
from holdall.narrow.delayed import E4M3, E5M2, is_delayed
from holdall.narrow.formats import Float8
from holdall.narrow.layers import multiplier_of
from holdall.narrow.product import Formats

OPERANDS = ("input", "weight", "gradient")
_COUNTS = "fp8_counts"
_WORST = 3  # layers that a report names
_NEAR = 1 + 1e-6  # the largest value itself may be a rounding above


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Of an operand of a layer, over all steps so far."""

    layer: str
    operand: str
    cut: int  # above the format's largest number
    zeroed: int  # not zero, and zero in the format
    wild: int  # not finite
    elements: int

    @property
    def share(self) -> float:
        return (self.cut + self.zeroed + self.wild) / max(1, self.elements)


def _scale_of(layer: nn.Module, which: int, values: Tensor) -> tuple[Tensor, torch.dtype]:
    if is_delayed(layer):
        dtype = E5M2 if which == OPERANDS.index("gradient") else E4M3
        held, most = layer.get_buffer("fp8_scales")[which], torch.linalg.vector_norm(values, float("inf"))
        return choose_scale(most, held, held, dtype, record=False), dtype
    formats = multiplier_of(layer)
    assert isinstance(formats, Formats)
    form = (formats.input, formats.weight, formats.grad_input)[which]
    assert isinstance(form, Float8)
    return form.scale_of(values, -1), form.dtype


def _count(layer: nn.Module, which: int, values: Tensor) -> None:
    with torch.no_grad():
        scale, dtype = _scale_of(layer, which, values)
        wide = values * (scale if scale.dim() else scale.reshape(1))
        is_wild = ~values.isfinite()
        is_cut = (wide.abs() > torch.finfo(dtype).max * _NEAR) & ~is_wild
        is_zero = (wide.to(dtype).float() == 0) & (values != 0)
        counts = layer.get_buffer(_COUNTS)[which]
        counts += torch.stack(
            [is_cut.sum(), is_zero.sum(), is_wild.sum(), is_cut.new_full((), values.numel(), dtype=torch.int64)]
        )


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _count(ctx.layer, 2, grad.reshape(-1, grad.shape[-1]))
        return grad, None


class _CountOperands:
    """A hook of the layer, before its forward; a copy of the model has its own."""

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if layer.training:
            weight = layer.get_parameter("weight").detach()
            _count(layer, 0, args[0].detach().reshape(-1, args[0].shape[-1]))
            _count(layer, 1, weight if isinstance(layer, nn.Linear) else weight.t())


class _CountGradient:
    """A hook of the layer, after its forward."""

    def __call__(self, layer: nn.Module, _: Any, y: Tensor) -> Tensor:
        made: Tensor = _Gradient.apply(y, layer) if layer.training else y  # type: ignore[no-untyped-call]
        return made


_CLOSED: WeakKeyDictionary[nn.Module, list[Lost]] = WeakKeyDictionary()  # of models whose recipe has been taken off


def put_on_counts(model: nn.Module) -> Callable[[], object]:
    """Count in every layer that computes in FP8; returns what takes it off, which keeps the counts for reports."""
    stack = ExitStack()
    for layer in [m for m in model.modules() if is_delayed(m) or isinstance(multiplier_of(m), Formats)]:
        device = layer.get_parameter("weight").device
        layer.register_buffer(_COUNTS, torch.zeros(len(OPERANDS), 4, dtype=torch.int64, device=device), persistent=False)
        stack.callback(delattr, layer, _COUNTS)
        stack.callback(layer.register_forward_pre_hook(_CountOperands()).remove)
        stack.callback(layer.register_forward_hook(_CountGradient()).remove)

    def undo() -> None:
        _CLOSED[model] = losses_of(model)
        stack.close()

    _CLOSED.pop(model, None)
    return undo


def losses_of(model: nn.Module) -> list[Lost]:
    """What layers have lost, in the order of the model; empty: nothing was counted."""
    found = []
    for name, layer in model.named_modules():
        if _COUNTS in layer._buffers:
            for operand, (cut, zeroed, wild, elements) in zip(OPERANDS, layer.get_buffer(_COUNTS).tolist(), strict=True):
                found.append(Lost(layer=name, operand=operand, cut=cut, zeroed=zeroed, wild=wild, elements=elements))
    return found or _CLOSED.get(model, [])


def told(model: nn.Module) -> tuple[str, ...]:
    """Lines for a report: which layer was the first to lose its numbers, and the layers that lose most."""
    found = losses_of(model)
    if not found:
        return ()
    lines = []
    first = _first_wild(found)
    if first is not None:
        lines.append(
            f"FP8 diverged: {first.wild:,} numbers that are not finite, first in the {first.operand} of `{first.layer}`"
        )
    worst = sorted((lost for lost in found if lost.cut or lost.zeroed), key=lambda lost: -lost.share)[:_WORST]
    for lost in worst:
        shares = ", ".join(
            f"{n / max(1, lost.elements):.2%} {what}" for n, what in ((lost.cut, "cut off"), (lost.zeroed, "to zero")) if n
        )
        lines.append(f"FP8 loses most in the {lost.operand} of `{lost.layer}`: {shares}")
    return tuple(lines or ["FP8 cut nothing off and made nothing zero"])


def _first_wild(found: list[Lost]) -> Lost | None:
    """In forward the first layer of the model, else the last, where backward begins."""
    wild = [lost for lost in found if lost.wild]
    forward = [lost for lost in wild if lost.operand != "gradient"]
    return forward[0] if forward else wild[-1] if wild else None
