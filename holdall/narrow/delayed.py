"""Linear layers in FP8 whose scales are from steps before: delayed scaling, as in NVIDIA's Transformer Engine.

A layer has a window of the largest values of its input, its weight and its output's gradient in the last steps. The scale of a
step is for the largest of the window; what is above is cut. Without a window yet, in the first step, and for a tensor that is
not finite, it is for the values at hand.

All of it is buffers of the layer, so it is saved with the model, and copies of the model have their own. Forward and backward
only raise what was seen in the step: to do so twice, for a block that is recomputed, changes nothing. The window moves when the
model is called for the next step, which is when a gradient has been seen; so scales are the same all through a step, in the
forwards that are repeated too, and after a restart from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdall.narrow.casts import choose_scale, held8, held8_both, largest, scaled, turn8
from holdall.narrow.formats import Float8
from holdall.narrow.kernels import MULTIPLE, can_scale, scaled_product
from holdall.narrow.layers import plain_class

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_INPUT, _WEIGHT = 0, 1
_HELD, _SEEN, _SEEN_GRAD, _WINDOW = "fp8_scales", "fp8_seen", "fp8_seen_grad", "fp8_window"
_LIMITS = (torch.finfo(E4M3).max, torch.finfo(E4M3).max, torch.finfo(E5M2).max)


class _Delayed(nn.Module):
    """What the classes of such layers share."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in (_HELD, _SEEN, _SEEN_GRAD, _WINDOW):  # a checkpoint that was made without them can be read
            state_dict.setdefault(prefix + name, self.get_buffer(name))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def is_delayed(layer: nn.Module) -> bool:
    return isinstance(layer, _Delayed)


class DelayedLinear(_Delayed, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return _product(self, input, self.weight)


def _turned(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    return _product(self, input, self.weight.t())


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: DelayedLinear}


def _class_for(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:  # Hugging Face's Conv1D
        _CLASSES[kind] = type("DelayedConv1D", (_Delayed, kind), {"forward": _turned})
    return _CLASSES[kind]


def _product(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    given = (layer.fp8_scales, layer.fp8_seen, layer.fp8_seen_grad, layer.training)
    y: Tensor = DelayedProduct.apply(x, weight, *given)  # type: ignore[no-untyped-call]
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def _cast(
    x: Tensor, held: Tensor, seen: Tensor, dtype: torch.dtype, *, record: bool, by_kernel: bool, both: bool = False
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Codes, their transposed copy where it is asked for, scale and unit."""
    if not by_kernel:
        most = torch.linalg.vector_norm(x, float("inf"))
        scale = choose_scale(most, held, seen, dtype, record=record)
        return scaled(x, scale, dtype, cut=True), None, scale, scale.reciprocal()
    if both:
        return held8_both(x, largest(x), held, seen, dtype, record=record)
    codes, scale, unit = held8(x, largest(x), held, seen, dtype, record=record)
    return codes, None, scale, unit


class DelayedProduct(torch.autograd.Function):
    """Backward keeps codes of the input and the scale of the weight, as `ScaledProduct` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: Tensor, seen: Tensor, seen_grad: Tensor, record: bool) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        form = Float8()
        by_kernel = flat.shape[0] % MULTIPLE == 0 and can_scale(weight, weight, form, form)
        is_kept = ctx.needs_input_grad[1]
        codes, turned, _, unit = _cast(flat, held[_INPUT], seen[_INPUT], E4M3, record=record, by_kernel=by_kernel, both=is_kept)
        of_weight, _, scale_w, unit_w = _cast(weight, held[_WEIGHT], seen[_WEIGHT], E4M3, record=record, by_kernel=by_kernel)
        kept = (codes if turned is None else turned, unit) if is_kept else ()
        ctx.save_for_backward(weight, scale_w, *kept)
        ctx.held, ctx.seen, ctx.record, ctx.by_kernel, ctx.shape = held, seen_grad, record, by_kernel, x.shape
        if by_kernel:
            y = scaled_product((codes, unit), (of_weight, unit_w), x.dtype, fast=True)
        else:
            y = ((codes.float() * unit) @ (of_weight.float() * unit_w).t()).to(x.dtype)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, scale_w, *kept = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        flat = grad.reshape(-1, grad.shape[-1])
        codes, turned, _, unit = _cast(
            flat, ctx.held[2], ctx.seen[0], E5M2, record=ctx.record, by_kernel=ctx.by_kernel, both=needs_w
        )
        dx = dw = None
        if needs_x:
            unit_w = scale_w.reciprocal()
            if ctx.by_kernel:
                dx = scaled_product((codes, unit), (turn8(weight, scale_w, E4M3), unit_w), grad.dtype)
            else:
                dx = (codes.float() * unit) @ (scaled(weight, scale_w, E4M3, cut=True).float() * unit_w)
            dx = dx.reshape(ctx.shape).to(grad.dtype)
        if needs_w:
            x, unit_x = kept
            if turned is not None:
                del codes
                dw = scaled_product((turned, unit), (x, unit_x), grad.dtype)
            else:
                dw = (codes.float() * unit).t() @ (x.float() * unit_x)
            dw = dw.to(weight.dtype)
        return dx, dw, None, None, None, None


class _NextStep:
    """A hook of the model: moves the windows of its layers if there was a backward since. A copy of the model has its own."""

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        layers: list[Any] = [m for m in model.modules() if isinstance(m, _Delayed)]
        if layers:
            with torch.no_grad():
                _move(layers)


def _move(layers: list[Any]) -> None:
    """In a few ops for all layers. Nothing is read on the host: whether there was a gradient is a number of the device."""
    buffers = {name: [m.get_buffer(name) for m in layers] for name in (_HELD, _SEEN, _SEEN_GRAD, _WINDOW)}
    seen = torch.cat([torch.stack(buffers[_SEEN]), torch.stack(buffers[_SEEN_GRAD])], 1)
    is_over = (seen[:, 2] > 0).any()
    before = torch.stack(buffers[_WINDOW])
    window = torch.where(is_over, torch.cat([seen.unsqueeze(-1), before[..., :-1]], -1), before)
    most = window.amax(-1)
    limits = torch.stack([torch.full_like(most[:, n], limit) for n, limit in enumerate(_LIMITS)], 1)
    seen = torch.where(is_over, 0.0, seen)
    torch._foreach_copy_(buffers[_WINDOW], window.unbind())
    torch._foreach_copy_(buffers[_HELD], torch.where(most > 0, limits / most, 0.0).unbind())
    torch._foreach_copy_(buffers[_SEEN], seen[:, :2].unbind())
    torch._foreach_copy_(buffers[_SEEN_GRAD], seen[:, 2:].unbind())


def put_on_delayed(model: nn.Module, *, skip: set[str], history: int) -> Callable[[], object]:
    """Delayed scaling for every linear layer but those in `skip`; returns what takes it off."""
    before: list[tuple[nn.Module, type[nn.Module]]] = []
    for name, layer in model.named_modules():
        kind = plain_class(layer)
        if kind is None or name in skip:
            continue
        zeros = {_HELD: (3,), _SEEN: (2,), _SEEN_GRAD: (1,), _WINDOW: (3, history)}
        for buffer, shape in zeros.items():
            layer.register_buffer(buffer, torch.zeros(shape, device=layer.get_parameter("weight").device))
        before.append((layer, kind))
        layer.__class__ = _class_for(kind)
    hook = model.register_forward_pre_hook(_NextStep())

    def undo() -> None:
        hook.remove()
        for layer, was in before:
            layer.__class__ = was
            for buffer in (_HELD, _SEEN, _SEEN_GRAD, _WINDOW):
                delattr(layer, buffer)

    return undo
