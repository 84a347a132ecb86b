"""The `.grad` of a parameter while its gradient is on the host or in another precision.

Between backward and step, a training loop reads the norms of gradients and multiplies them, to clip or to unscale. Both work
without the gradient: norms are computed on the device before it is copied out, and the update applies the recorded factor. Any
other op fetches the gradient first, as a plain tensor.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from holdall.errors import Unsupported

aten = torch.ops.aten
_NORMS = (aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar)
_FACTORS = (aten.mul_.Tensor, aten.mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar)
_CLEARS = (aten.zero_.default, aten._foreach_zero_.default)
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
_ALIASES = (aten.detach.default, aten.alias.default)


_HINT = "read gradients between backward and step, and use fit(..., reads_gradients=True), which keeps them until then"


class Source(Protocol):
    """Knows the gradients of some parameters."""

    def norm(self, index: int) -> torch.Tensor | None:
        """The 2-norm of a gradient, on the device of its parameter; None: unknown."""
        ...

    def known_norm(self, index: int, device: torch.device | None = None) -> torch.Tensor | None:
        """The norm, if it needs no computation; None: it does. `device`: where it is wanted, if it is there too."""
        ...

    def bring(self, index: int) -> torch.Tensor:
        """A copy of the gradient in its parameter's dtype and on its device."""
        ...


class Gradient(torch.Tensor):
    """An offloaded gradient. `factor` and `here` record what the loop did to it."""

    source: Source
    place: int  # index among the source's parameters
    factor: torch.Tensor | None
    here: torch.Tensor | None  # the fetched gradient; from then on the valid one
    spent: str  # why it can no longer be read; empty: it can
    is_cleared: bool  # set to zero: the next backward starts a new sum

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: Source, index: int) -> Gradient:
        made: Gradient = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, like: torch.Tensor, source: Source, index: int) -> None:  # noqa: ARG002
        self.source = source
        self.place = index
        self.renew()

    def renew(self) -> None:
        """A new gradient has arrived."""
        self.factor, self.here, self.spent, self.is_cleared = None, None, "", False

    @property
    def is_untouched(self) -> bool:
        return self.factor is None and self.here is None and not self.spent

    def value(self) -> torch.Tensor:
        """The gradient as a plain tensor."""
        if self.spent:
            raise Unsupported(f"the gradient is gone: {self.spent}", hint=_HINT)
        if self.here is None:
            self.here = self.source.bring(self.place)
            if self.factor is not None:
                self.here.mul_(self.factor)
                self.factor = None
        return self.here

    def times(self, factor: Any) -> None:
        """Multiply in place."""
        if self.spent or self.factor is not None or self.here is not None:
            self.value().mul_(factor)
        else:
            self.factor = factor if isinstance(factor, torch.Tensor) else torch.tensor(factor, dtype=self.dtype)

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer the ops of clipping without the dispatcher; pass anything else on to it."""
        if func is torch.linalg.vector_norm:
            found = self.source.known_norm(self.place) if all(o == 2 for o in args[1:]) and _is_untouched(self) else None
            if found is not None:
                return found
        elif func is torch.Tensor.mul_ and len(args) == 2 and _is_factor(args[1]):
            self.times(args[1])
            return self
        return func(*args)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.value())

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        rest = [g for g in _listed(first) if isinstance(g, torch.Tensor) and not isinstance(g, Gradient)]
        if func in _NORMS and not kwargs and all(o == 2 for o in args[1:]):
            norms = [g.source.norm(g.place) if _is_untouched(g) else None for g in _listed(first) if isinstance(g, Gradient)]
            if all(n is not None for n in norms):
                others = iter(func(rest, *args[1:]) if rest else ())
                ours = iter(norms)
                every = [next(ours if isinstance(g, Gradient) else others) for g in _listed(first)]
                return every if isinstance(first, (list, tuple)) else every[0]
        if func in _FACTORS and isinstance(_listed(first)[0], torch.Tensor) and _is_factor(args[1]):
            if rest:  # parameters that are not placed, or not in this optimizer
                func(rest if isinstance(first, (list, tuple)) else first, args[1])
            for g in _listed(first):
                if isinstance(g, Gradient):
                    g.times(args[1])
            return None if isinstance(first, (list, tuple)) else first
        if func in _CLEARS and all(isinstance(g, Gradient) for g in _listed(first)):
            for g in _listed(first):
                g.renew()
                g.here, g.is_cleared = torch.zeros(g.shape, dtype=g.dtype, device=g.device), True
            return None if isinstance(first, (list, tuple)) else first
        if func in _ALIASES:
            return first
        if func is _UNSCALE and _are_finite(first):
            if rest:
                func(rest, *args[1:], **kwargs)
            if args[2].item() != 1:
                for g in _listed(first):
                    if isinstance(g, Gradient):
                        g.times(args[2])
            return None
        plain_args, plain_kwargs = tree_map_only(Gradient, Gradient.value, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        is_in_place = isinstance(first, Gradient) and out is first.here
        return first if is_in_place else out


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_untouched(g: Any) -> bool:
    return isinstance(g, Gradient) and g.is_untouched


def _are_finite(grads: Any) -> bool:
    """Do the norms show that all gradients are finite? Then a GradScaler need not fetch them."""
    away = [g for g in grads if isinstance(g, Gradient)]
    norms = [g.source.norm(g.place) if _is_untouched(g) else None for g in away]
    return all(n is not None and bool(n.isfinite()) for n in norms)


def _is_factor(value: Any) -> bool:
    if isinstance(value, Gradient):
        return False
    return not isinstance(value, torch.Tensor) or value.dim() == 0
