"""Linear layers whose frozen weight is stored packed, and expanded at every use.

The layer gets another class, and its parameter another `data`: one tensor of bytes. The parameter itself stays the same object
under the same name, so optimizers, units and placements hold what they held. A product expands the weight, multiplies and drops
it; for backward it saves the bytes and expands them again there, and nothing of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from holdall.errors import Unsupported
from holdall.narrow.nf4 import NormalFloat4

Undo = Callable[[], object]
_ATTRIBUTE = "_holdall_packed"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What a packed weight was, and the dtype that its layer computes in where float32 arrives."""

    form: NormalFloat4
    shape: torch.Size
    dtype: torch.dtype
    compute: torch.dtype

    def pack(self, values: Tensor) -> Tensor:
        """On a GPU if there is one, where it takes a second for a billion weights."""
        near = "cuda" if values.device.type == "cpu" and torch.cuda.is_available() else values.device
        return self.form.pack(values.to(near)).to(values.device)

    def expand(self, packed: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if packed.device.type == "meta":
            return packed.new_empty(self.shape, dtype=dtype or self.dtype)
        return self.form.expand(packed, self.shape, dtype or self.dtype)


class PackedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        how, kind = _packed(self), input.device.type
        x = input
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        elif x.dtype == torch.float32:
            x = x.to(how.compute)
        if not x.is_floating_point():
            got = str(x.dtype).removeprefix("torch.")
            raise Unsupported(
                f"a packed layer was called with {got}: the model reads the dtype of its weight",
                hint="leave such layers out by a part of their names: precision=`nf4:skip=NAME`",
            )
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y: Tensor = _Product.apply(x, self.weight, bias, how)  # type: ignore[no-untyped-call]
        return y

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The weight's own shape and dtype; on the host, as the device may not have room for all of them."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with torch.no_grad():
            whole = _packed(self).expand(self.weight)
        whole = whole.cpu() if whole.is_cuda else whole
        whole.holdall_write_back = partial(_write, self, whole)  # type: ignore[attr-defined]
        destination[prefix + "weight"] = whole

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.get(prefix + "weight")
        if isinstance(given, Tensor) and given.shape == _packed(self).shape and given.shape != self.weight.shape:
            state_dict = {**state_dict, prefix + "weight": _packed(self).pack(given)}
        super()._load_from_state_dict(state_dict, prefix, *args)


def _packed(layer: nn.Module) -> Packed:
    found: Packed = getattr(layer, _ATTRIBUTE)
    return found


def _write(layer: PackedLinear, values: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(_packed(layer).pack(values))


class _Product(torch.autograd.Function):
    """x W^T + b; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, how: Packed) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(packed)
        return F.linear(x, how.expand(packed, x.dtype), bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        (grad,) = grads
        of_input = grad @ ctx.how.expand(packed, grad.dtype) if ctx.needs_input_grad[0] else None
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None


def frozen_layers(model: nn.Module, form: NormalFloat4, *, skip: Collection[str]) -> list[nn.Linear]:
    """Linear layers whose weight is frozen, used nowhere else, and smaller when packed."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                uses[id(p)] = uses.get(id(p), 0) + 1
    return [
        layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and name not in skip
        and type(layer.weight) is nn.Parameter
        and not layer.weight.requires_grad
        and layer.weight.dtype in _FLOATS
        and uses[id(layer.weight)] == 1
        and form.nbytes(layer.weight.numel()) < layer.weight.nbytes
    ]


def put_on_frozen(layers: Collection[nn.Linear], form: NormalFloat4, compute: torch.dtype, *, keep: str) -> Undo:
    """Pack the weights of these layers; returns a function that gives them back.

    `keep`: "no", the values of the packed weights are given back; "host", the weights as they were, which wait on the host;
    "there", the same, and they wait where they are.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(_put_on(layer, form, compute, keep))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what packing took is not the step's
        undo = stack.pop_all()
    return undo.close


def _put_on(layer: nn.Linear, form: NormalFloat4, compute: torch.dtype, keep: str) -> Undo:
    p, was = layer.weight, layer.weight.data
    how = Packed(form=form, shape=was.shape, dtype=was.dtype, compute=compute)
    before = {"no": None, "host": was if was.device.type == "meta" else was.cpu(), "there": was}[keep]
    p.data = how.pack(was)
    layer.__class__ = PackedLinear
    setattr(layer, _ATTRIBUTE, how)
    del was

    def undo() -> None:
        layer.__class__ = nn.Linear
        delattr(layer, _ATTRIBUTE)
        if before is None:
            p.data = how.expand(p.data)
        else:
            p.data = before if keep == "there" else before.to(p.device)

    return undo


def packed_bytes(form: NormalFloat4) -> float:
    """Bytes of a weight in a large layer."""
    large = form.block * 2**20
    return round(form.nbytes(large) / large, 6)
