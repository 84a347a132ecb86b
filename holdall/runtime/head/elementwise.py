"""Elementwise ops on logits in chunks of rows: soft-capping, scaling, a bias over the vocabulary.

Each op runs in place on a chunk, with the kernel and dtype that the model used, so the forward rounds as without chunks. The
gradient is propagated back through the ops in place, too. `tanh` needs its result for that: one more chunk of memory. No
operand may require a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdall.errors import Unsupported
from holdall.runtime.head.divided_words import DividedWords

Operand = float | int | Tensor
OPS: dict[Any, str] = {
    **dict.fromkeys((Tensor.mul, Tensor.multiply, torch.mul, torch.multiply), "mul"),
    **dict.fromkeys((Tensor.div, Tensor.true_divide, torch.div, torch.true_divide), "div"),
    **dict.fromkeys((Tensor.add, torch.add), "add"),
    **dict.fromkeys((Tensor.sub, torch.sub), "sub"),
    **dict.fromkeys((Tensor.tanh, torch.tanh), "tanh"),
}
COMMUTATIVE = frozenset(op for op, name in OPS.items() if name in ("mul", "add"))


@dataclass(frozen=True, slots=True)
class ElementwiseStep:
    """One op, by method name. `operand`: a number, or a tensor that is the same for every row; None for `tanh`."""

    name: str
    operand: Operand | None = None
    version: int = 0  # version of a tensor operand

    @property
    def needs_result(self) -> bool:
        """Is its derivative computed from its result?"""
        return self.name == "tanh"

    def part(self, words: DividedWords) -> ElementwiseStep:
        """The same on the logits of a rank's own words."""
        is_by_word = isinstance(self.operand, Tensor) and self.operand.numel() > 1
        return replace(self, operand=words.part(self.operand)) if is_by_word else self  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise if the operand has changed since the op was called."""
        if isinstance(self.operand, Tensor) and version_of(self.operand) != self.version:
            raise Unsupported(
                f"the logits were read after an operand of their `{self.name}` was changed in place",
                hint='read the logits before changing it, or call fit(..., head="whole")',
            )

    def apply(self, z: Tensor) -> None:
        """Apply the op to logits, in place."""
        if self.name == "tanh":
            z.tanh_()
        else:  # a number stays a number: a trace would count a tensor
            op = getattr(torch.ops.aten, f"{self.name}_")
            (op.Tensor if isinstance(self.operand, Tensor) else op.Scalar)(z, self.operand)

    def pull_back(self, g: Tensor, result: Tensor | None) -> None:
        """Turn the gradient of its result into that of its input, in place."""
        if self.name == "tanh":
            torch.ops.aten.tanh_backward.grad_input(g, result, grad_input=g)
        elif self.name in ("mul", "div"):
            self.apply(g)


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops on every logit: `before` in the head's dtype, then a cast to float32, then `after`."""

    before: tuple[ElementwiseStep, ...] = ()
    after: tuple[ElementwiseStep, ...] = ()

    def then(self, link: ElementwiseStep, *, cast: bool) -> Chain:
        """The chain with one more op, on logits that were cast to float32 or not."""
        return Chain(self.before, (*self.after, link)) if cast else Chain((*self.before, link), self.after)

    def part(self, words: DividedWords) -> Chain:
        return Chain(*(tuple(link.part(words) for link in links) for links in (self.before, self.after)))

    def check(self) -> None:
        for link in (*self.before, *self.after):
            link.check()


NO_CHAIN = Chain()


class Stretch:
    """Applies links in order to chunks of rows, and keeps the results that their derivatives need."""

    def __init__(self, links: Sequence[ElementwiseStep], like: Tensor, *, differentiable: bool) -> None:
        self._links = links
        self._rooms = [torch.empty_like(like) if differentiable and link.needs_result else None for link in links]

    def __bool__(self) -> bool:
        return bool(self._links)

    def apply(self, z: Tensor) -> None:
        """Apply the links to the logits of some rows, in place."""
        for link, room in zip(self._links, self._rooms, strict=True):
            link.apply(z)
            if room is not None:
                room[: z.shape[0]].copy_(z)

    def pull_back(self, g: Tensor) -> None:
        """Propagate the gradient of those rows back, in place."""
        for link, room in zip(reversed(self._links), reversed(self._rooms), strict=True):
            link.pull_back(g, None if room is None else room[: g.shape[0]])


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def link_for(func: Any, args: Sequence[Any], logits: Tensor) -> tuple[ElementwiseStep, torch.dtype] | None:
    """(the link for an op on logits, the dtype of its result); None: the op cannot be applied row by row.

    Uses only the metadata of `logits`, not their values.
    """
    name = OPS[func]
    if name == "tanh" or len(args) != 1:
        return (ElementwiseStep(name), logits.dtype) if name == "tanh" and not args else None
    operand = args[0]
    if type(operand) in (int, float):
        return ElementwiseStep(name, operand), logits.dtype
    if not isinstance(operand, Tensor) or not _is_same_for_every_row(operand, logits):
        return None
    dtype = logits.dtype if operand.dim() == 0 else torch.promote_types(logits.dtype, operand.dtype)
    return ElementwiseStep(name, operand.reshape(-1) if operand.dim() else operand, version_of(operand)), dtype


def _is_same_for_every_row(operand: Tensor, logits: Tensor) -> bool:
    """Is it a constant with one element, or with one per vocabulary entry?"""
    if is_traceable_wrapper_subclass(operand) or operand.is_complex() or (operand.requires_grad and torch.is_grad_enabled()):
        return False
    if operand.device != logits.device and operand.dim():
        return False
    *lead, last = operand.shape or (1,)
    return operand.dim() <= logits.dim() and all(n == 1 for n in lead) and last in (1, logits.shape[-1])


def pulled_back(g: torch.Tensor, z: torch.Tensor, chain: Chain) -> torch.Tensor:
    """Turn the gradient of a chain's result into that of its input logits."""
    before = Stretch(chain.before, z, differentiable=True)
    before.apply(z)
    p = z.to(g.dtype)
    after = Stretch(chain.after, p, differentiable=True)
    after.apply(p)
    g = g.clone()
    after.pull_back(g)
    g = g.to(z.dtype)
    before.pull_back(g)
    return g
