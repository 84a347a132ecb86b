"""What a parameter's `.grad` is while its gradient lies in another tier, or in another width.

A training loop does two things with gradients between backward and step: it asks for their norms and multiplies them, to clip
or to take the scale of a loss out again. Both can be answered without the gradient: norms are taken on the device as gradients
leave, and a factor is written down and applied by the update. Everything else brings the gradient home first, as the plain
tensor it stands for.
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


_HINT = "look at gradients between backward and step, and plan with `clips=True`, which keeps them until then"


class Source(Protocol):
    """Who knows the gradients of some parameters."""

    def norm(self, index: int) -> torch.Tensor | None:
        """The 2-norm of one, on the device of its parameter; None: not known."""
        ...

    def known_norm(self, index: int) -> torch.Tensor | None:
        """The same where nothing must be computed for it; None: something must."""
        ...

    def bring(self, index: int) -> torch.Tensor:
        """A copy of it, as wide as its parameter and where its parameter is."""
        ...


class Gradient(torch.Tensor):
    """A gradient that is elsewhere. `factor` and `here` are what the loop has done to it."""

    source: Source
    place: int  # among the parameters that its source knows
    factor: torch.Tensor | None
    here: torch.Tensor | None  # brought home: from then on it is the truth
    spent: str  # why it must not be touched any more; empty: it may
    is_cleared: bool  # set to zero: the next backward begins anew

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: Source, index: int) -> Gradient:
        made: Gradient = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, like: torch.Tensor, source: Source, index: int) -> None:  # noqa: ARG002
        self.source = source
        self.place = index
        self.renew()

    def renew(self) -> None:
        """A new gradient has come."""
        self.factor, self.here, self.spent, self.is_cleared = None, None, "", False

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
        """Multiplied in place."""
        if self.spent or self.factor is not None or self.here is not None:
            self.value().mul_(factor)
        else:
            self.factor = factor if isinstance(factor, torch.Tensor) else torch.tensor(factor, dtype=self.dtype)

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What clipping asks of every gradient by itself, without the way through the dispatcher; anything else goes there."""
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
            if rest:  # of parameters that are not placed, or not in this optimizer
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
    return isinstance(g, Gradient) and g.factor is None and g.here is None and not g.spent


def _are_finite(grads: Any) -> bool:
    """Whether that follows from the norms of those that are elsewhere, so that a GradScaler need not see them."""
    away = [g for g in grads if isinstance(g, Gradient)]
    norms = [g.source.norm(g.place) if _is_untouched(g) else None for g in away]
    return all(n is not None and bool(n.isfinite()) for n in norms)


def _is_factor(value: Any) -> bool:
    if isinstance(value, Gradient):
        return False
    return not isinstance(value, torch.Tensor) or value.dim() == 0
