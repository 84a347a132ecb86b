"""Module calls while they are recorded, and their arguments without tensors, so that a call can be repeated on fakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from holdall.attributes import Attributes
from holdall.tracing.values.effects import NONE, Effects


class Like(NamedTuple):
    """A tensor's metadata."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(t: torch.Tensor) -> Like:
        return Like(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad)

    def make(self) -> torch.Tensor:
        """A new tensor with this metadata, of the kind that the current mode makes."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Given:
    """The arguments of one call, and the autocast around it."""

    leaves: tuple[Any, ...]  # with a `Like` in place of each tensor
    spec: TreeSpec
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def of(args: Any) -> Given | None:
        """Record the arguments; None: some tensor cannot be recreated from its strides."""
        leaves, spec = tree_flatten(args)
        if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in leaves):
            return None
        like = tuple(Like.of(t) if isinstance(t, torch.Tensor) else t for t in leaves)
        casts = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda"))
        return Given(like, spec, casts)

    def make(self) -> tuple[Any, Any]:
        """(args, kwargs) with newly made tensors."""
        leaves = [leaf.make() if isinstance(leaf, Like) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(slots=True)
class Call:
    """One module call while it is being recorded."""

    path: str
    nth: int
    kind: str
    composite: bool
    transparent: bool
    depth: int
    first: int
    first_save: int
    inputs: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[int, ...] = ()
    last: int = -1
    last_save: int = 0
    backward: int | None = None
    odd: str = ""
    quiet: bool = False  # made without gradients
    leaves: dict[int, int] = field(default_factory=dict)  # index of an output -> tensor
    wanted: set[int] = field(default_factory=set)  # indices of outputs that received a gradient, from inside or outside
    given: Given | None = None
    before: Attributes | None = None  # until it returns
    effects: Effects = NONE
    children: list[Call] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the block that it may become."""
        return self.path if self.nth == 0 else f"{self.path}#{self.nth}"

    def walk(self) -> Iterator[Call]:
        """This call and those inside."""
        yield self
        for call in self.children:
            yield from call.walk()
