"""Linear layers that save a sketch of their input for backward instead of the input.

For y = x W^T the backward needs x only for the gradient of W, G = gy^T x. Saving z = x P, with P random and regenerated from a
seed, gives G P directly: the full gradient never exists. The output and the gradient of x are those of `nn.Linear`, bit for
bit. Layers that read the same tensor one after the other (query, key, value) share one sketch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdall.errors import Unsupported

Key = tuple[int, int, str]  # seed, rank and kind of a projector


class Sketcher(Protocol):
    """Holds the projectors and receives the gradients."""

    def key_for(self, weight: Tensor, shared: Key | None) -> Key:
        """The key of this weight's projector; `shared`: the key of another weight with the same input, to be used here too."""
        ...

    def projector(self, weight: Tensor, like: Tensor) -> Tensor:
        """(rank, inputs)."""
        ...

    def take(self, weight: Tensor, low: Tensor) -> Tensor | None:
        """Add to the weight's sketched gradient, (outputs, rank); or return the gradient that autograd shall use."""
        ...


class SketchedGradient(Tensor):
    """A sketched gradient that autograd passes on: the shape of its weight, and the bytes of the sketch `low`."""

    low: Tensor

    @staticmethod
    def __new__(cls, low: Tensor, like: Tensor) -> SketchedGradient:
        made: SketchedGradient = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return made

    def __init__(self, low: Tensor, like: Tensor) -> None:  # noqa: ARG002
        self.low = low

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SketchedGradient({tuple(self.shape)} as {tuple(self.low.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = next(a for a in args if isinstance(a, SketchedGradient))
        if func not in _LINEAR or any(isinstance(a, Tensor) and a.dim() and not isinstance(a, cls) for a in args):
            raise Unsupported(
                f"`{func}` cannot take a sketched gradient, which can only be added, scaled and measured",
                hint="use this weight in linear layers only, or put it into a parameter group without `rank`",
            )
        out = func(*(a.low if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        if out is first.low:
            return first
        return cls(out, first) if out.shape == first.low.shape else out


_aten = torch.ops.aten
_LINEAR = frozenset(
    {
        _aten.detach.default,
        _aten.alias.default,
        _aten.clone.default,
        _aten.add.Tensor,
        _aten.add_.Tensor,
        _aten.mul_.Tensor,
        _aten.div_.Tensor,
        _aten.linalg_vector_norm.default,
    }
)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, take: Callable[[Tensor], Tensor | None]
    ) -> Tensor:
        ctx.save_for_backward(z, weight)
        ctx.take = take
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        z, weight = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        wide = weight.to(rows.dtype)  # under autocast the layer computes in another precision than its weight's
        grad_x = (rows @ wide).view(*grad.shape[:-1], weight.shape[1]) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        whole = ctx.take(rows.t() @ z.reshape(-1, z.shape[-1]))
        return grad_x, whole, grad_bias, None, None


class _Last:
    """The last sketch, while its input and the sketch itself are alive."""

    def __init__(self) -> None:
        self._x: Callable[[], Tensor | None] = lambda: None
        self._z: Callable[[], Tensor | None] = lambda: None
        self._version, self._key = -1, (0, 0, "")

    def of(self, x: Tensor) -> Key | None:
        """The key of this very tensor's sketch, if it is the last one."""
        return self._key if self._x() is x and self._version == x._version else None

    def sketch(self, x: Tensor, key: Key, projector: Callable[[], Tensor]) -> Tensor:
        z = self._z()
        if z is None or self.of(x) != key:
            z = x.detach() @ projector().t()
            self._x, self._z = weakref.ref(x), weakref.ref(z)
            self._version, self._key = x._version, key
        return z


@contextmanager
def sketching(model: nn.Module, sketcher: Sketcher, weights: Callable[[Tensor], bool]) -> Iterator[list[nn.Linear]]:
    """Inside, linear layers whose weight is selected save sketches; on leaving, each gets its own forward back."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and weights(m.weight)]
    for layer in layers:
        if "forward" in vars(layer) or type(layer).forward is not nn.Linear.forward:
            raise Unsupported(
                f"the forward of a {type(layer).__name__} was already replaced",
                hint="make the optimizer before other code replaces the forward, or give this weight no `rank`",
            )
    if not layers:
        raise Unsupported(
            "no linear layer of this model has a weight with a rank", hint="use `Compact.groups(model, rank=...)`"
        )
    last = _Last()
    try:
        for layer in layers:
            vars(layer)["forward"] = _forward(layer, sketcher, last)
        yield layers
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, sketcher: Sketcher, last: _Last) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight = layer.weight
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return F.linear(x, weight, layer.bias)
        key = sketcher.key_for(weight, last.of(x))
        z = last.sketch(x, key, lambda: sketcher.projector(weight, x))
        made: Tensor = _Linear.apply(x, weight, layer.bias, z, lambda low: sketcher.take(weight, low))
        return made

    return forward
