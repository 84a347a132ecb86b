"""Weights stored in 8 bits: decoded for each product, and rounded stochastically when an update is written.

Q-GaLore's weights (Zhang et al. 2024, arXiv 2407.08296). Blocks of 256 elements have a scale and a zero; the 256 levels between
a block's least and largest value are even. There is no fp32 copy: an update decodes the weight, changes it and writes it
back, rounded up with the probability of the remainder. Updates smaller than a level are then right on average, where rounding
to the nearest would lose them all. The two ends of a block's range are moved to their nearest level.

    int8_(model)  # the weights of its linear layers
    optimizer = GaLore(GaLore.groups(model, rank=128, bits=8, projector_bits=4, lazy=True), lr=1e-2)

An n-element weight takes n + 5 ceil(n / 256) bytes. A linear layer keeps the codes for backward, and decodes them again there.
Gradients have the precision of the computation. Optimizers of this package that update decoded values train such weights, the
others raise. Plans do not count these weights yet, and tracing such a model raises.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from holdall.codecs.levels import decode_levels, encode_levels
from holdall.errors import Unsupported

_aten = torch.ops.aten
Coded = tuple[Tensor, Tensor, Tensor]  # codes, scales, zeros


class Int8Weight(Tensor):
    """A float tensor for computation; in memory codes, scales and zero points.

    `copy_` writes with stochastic rounding, by random numbers of its own: from a seed, and the number of writes so far.
    """

    coded: Coded
    draws: list[int]  # the seed and the number of writes, shared by all views

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, coded: Coded, draws: list[int]) -> Int8Weight:
        made: Int8Weight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=coded[0].device)  # type: ignore[attr-defined]
        made.coded, made.draws = coded, draws
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def of(cls, values: Tensor, *, seed: int = 0) -> Int8Weight:
        """The values, rounded to the nearest levels."""
        return cls(values.shape, values.dtype, encode_levels(values.detach(), bits=8), [seed, 0])

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a new plain tensor."""
        return decode_levels(*self.coded, bits=8, numel=self.numel()).to(dtype or self.dtype).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Store these values, each rounded up or down at random: the mean of many writes is the written value."""
        seed, count = self.draws
        self.draws[1] = count + 1
        source = torch.Generator(device=self.device).manual_seed((seed << 32) + count)
        for kept, found in zip(self.coded, encode_levels(values, bits=8, generator=source), strict=True):
            kept.copy_(found)

    def copied(self, device: torch.device | None = None) -> Int8Weight:
        """The same codes in other memory, with the same random numbers to follow."""
        codes, scales, zeros = (kept.to(device or self.device, copy=True) for kept in self.coded)
        return type(self)(self.shape, self.dtype, (codes, scales, zeros), list(self.draws))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Weight({self.decoded()})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls):
            if func is _aten.detach.default:
                return cls(first.shape, first.dtype, first.coded, first.draws)
            if func is _aten.copy_.default:
                first.write(args[1].decoded() if isinstance(args[1], cls) else args[1])
                return first
            if func in (_aten.clone.default, _aten._to_copy.default) and kwargs.get("dtype") in (None, first.dtype):
                return first.copied(kwargs.get("device"))
            if func._schema.is_mutable:
                raise Unsupported(
                    f"`{func.__name__}` cannot change an 8-bit weight in place",
                    hint="change a copy and write it back: values = weight.decoded(); ...; weight.copy_(values)",
                )
        return func(*tree_map_only(cls, cls.decoded, args), **tree_map_only(cls, cls.decoded, kwargs))


class _Int8Linear(torch.autograd.Function):
    """x W^T + b; for backward it keeps x and the codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.decoded(x.dtype), bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight.decoded(grad.dtype) if ctx.needs_input_grad[0] else None,
            (rows.mT @ x.reshape(-1, x.shape[-1])).to(weight.dtype) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if bias is None else bias.to(x.dtype)
    out: Tensor = _Int8Linear.apply(x, weight, bias)
    return out


def int8_(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Convert the weights of a model's linear layers to 8 bits, in place, and return the model; make the optimizer afterwards.

    A weight that another module uses too (a tied head) stays as it is, as do embeddings, norms and biases.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and owners[id(m.weight)] == 1]
    if not layers:
        raise Unsupported(
            "`int8_` found no linear layer with an untied weight", hint="call it on a model with `torch.nn.Linear` layers"
        )
    for number, layer in enumerate(layers, seed):
        trained = layer.weight.requires_grad
        layer.weight = nn.Parameter(Int8Weight.of(layer.weight, seed=number), requires_grad=trained)
    return model


torch.serialization.add_safe_globals([Int8Weight])
