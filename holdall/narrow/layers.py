"""Puts narrow products on the layers of a model, and takes them off.

A layer gets another class with the same parameters and name, so that its weights, hooks and copies stay what they are; the
model itself is not changed. Layers of a class of their own, or with parametrised weights, are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from holdall.errors import InvalidInput
from holdall.narrow.product import Convolution, Multiplier

Undo = Callable[[], object]
_ATTRIBUTE = "_holdall_multiplier"


def _multiplier(layer: nn.Module) -> Multiplier:
    found: Multiplier = getattr(layer, _ATTRIBUTE)
    return found


def multiplier_of(layer: nn.Module) -> Multiplier | None:
    """Of a layer with narrow products; None: it has its own."""
    found: Multiplier | None = getattr(layer, _ATTRIBUTE, None)
    return found


class NarrowLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return _with_bias(_product(input, self.weight, _multiplier(self)), self.bias)


class NarrowConv1d(nn.Conv1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return _convolved(self, input)


class NarrowConv2d(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return _convolved(self, input)


def _turned(self: Any, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """The forward of Hugging Face's Conv1D, a linear layer whose weight is transposed."""
    return _with_bias(_product(input, self.weight.t(), _multiplier(self)), self.bias)


def _product(x: torch.Tensor, weight: torch.Tensor, by: Multiplier, how: Convolution | None = None) -> torch.Tensor:
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return by.multiply(x, weight, how)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _convolved(layer: nn.Conv1d | nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    assert not isinstance(layer.padding, str)  # such layers are left alone
    how = Convolution(stride=layer.stride, padding=layer.padding, dilation=layer.dilation, groups=layer.groups)
    y = _product(x, layer.weight, _multiplier(layer), how)
    return y if layer.bias is None else y + layer.bias.to(y.dtype).reshape(-1, *[1] * (y.dim() - 2))


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: NarrowLinear,
    nn.Conv1d: NarrowConv1d,
    nn.Conv2d: NarrowConv2d,
}


def _class_for(layer: nn.Module, *, convolutions: bool) -> type[nn.Module] | None:
    kind = type(layer)
    if kind is nn.Linear:
        return _CLASSES[kind]
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return _CLASSES.setdefault(kind, type("NarrowConv1D", (kind,), {"forward": _turned}))
    if not convolutions or kind not in (nn.Conv1d, nn.Conv2d) or isinstance(layer.padding, str):
        return None
    return _CLASSES[kind] if layer.padding_mode == "zeros" else None


def plain_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class of a linear layer that can have another; None: it is no such layer."""
    return type(layer) if _class_for(layer, convolutions=False) is not None else None


def layer_names(model: nn.Module) -> list[str]:
    """Names of the layers that can have narrow products."""
    return [name for name, layer in model.named_modules() if _class_for(layer, convolutions=True) is not None]


def skipped_layers(model: nn.Module, names: Iterable[str], *, ends: bool, head: bool) -> set[str]:
    """Names of layers that keep their precision: those whose name contains one of `names`, the head, the first and the last."""
    layers = layer_names(model)
    given = [n for n in names if n]
    for name in given:
        if not any(re.search(re.escape(name), layer) for layer in layers):
            raise InvalidInput(f"`skip` names `{name}`, and no layer has that in its name", hint=_hint(layers))
    found = {layer for layer in layers if any(name in layer for name in given)}
    if ends and layers:
        found |= {layers[0], layers[-1]}
    output = getattr(model, "get_output_embeddings", lambda: None)() if head else None
    return found | {name for name, layer in model.named_modules() if layer is output and output is not None}


def _hint(layers: list[str]) -> str:
    return (
        f"layers are {', '.join(layers[:4])}{', ...' if len(layers) > 4 else ''}" if layers else "the model has no such layer"
    )


def put_on_layers(
    model: nn.Module, multiplier: Callable[[str], Multiplier | None], *, skip: set[str], convolutions: bool = True
) -> Undo:
    """Give every layer but those in `skip` the multiplier for its name (None: none)."""
    before: list[tuple[nn.Module, type[nn.Module]]] = []
    for name, layer in model.named_modules():
        kind = _class_for(layer, convolutions=convolutions)
        if kind is None or name in skip:
            continue
        chosen = multiplier(name)
        if chosen is None or chosen.is_off:
            continue
        before.append((layer, type(layer)))
        layer.__class__ = kind
        setattr(layer, _ATTRIBUTE, chosen)

    def undo() -> None:
        for layer, was in before:
            layer.__class__ = was
            delattr(layer, _ATTRIBUTE)

    return undo
