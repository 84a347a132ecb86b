"""Plans for batches of several sizes; the smallest that fits is chosen at the beginning of each forward.

A `Bucket` is a plan with the input shapes that it was made for. It serves every call whose inputs are at most as large along
every axis, so the meaning of the axes is not needed. It is needed only to make a larger batch from a sample: `find_axes` says
which axes are rows and which are tokens, or that they are ambiguous.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from holdall.errors import HoldallError, Unsupported
from holdall.types import Plan

Shapes = dict[str, tuple[int, ...]]  # tensors in a model call, by name
_STEP = 1.25  # ratio of neighbouring bucket sizes, so that few buckets are made
_GIVE_BATCHES = "pass sample batches instead: fit(..., lengths=[short_batch, long_batch])"


class ModelCall:
    """Names the arguments of a model call, however the loop passes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):  # a forward without a Python signature
            self._signature = None

    def shapes(self, args: Any, kwargs: Any) -> Shapes:
        """Shapes of every tensor in a call."""
        given: dict[str, Any] = {str(n): a for n, a in enumerate(args)} | kwargs
        if self._signature is not None:
            with suppress(TypeError):  # an invalid call: the model itself will raise
                given = dict(self._signature.bind(*args, **kwargs).arguments)
        leaves, _ = tree_flatten_with_path(given)
        return {keystr(path): tuple(t.shape) for path, t in leaves if isinstance(t, torch.Tensor)}


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A plan and the largest inputs that it covers."""

    shapes: Shapes
    plan: Plan

    def covers(self, shapes: Shapes) -> bool:
        """Are these inputs at most as large along every axis?"""
        own = self.shapes
        return all(
            name in own and len(shape) == len(own[name]) and all(n <= most for n, most in zip(shape, own[name], strict=True))
            for name, shape in shapes.items()
        )

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def __str__(self) -> str:
        return ", ".join(f"{name.strip('.[]')!s} {list(shape)}".replace("'", "") for name, shape in self.shapes.items())


Make = Callable[[Any, Any], Bucket]


class Buckets:
    """All plans. A call that none covers gets its own, by `make(args, kwargs)`."""

    def __init__(self, found: Iterable[Bucket], call: ModelCall, make: Make) -> None:
        self.found = sorted(found, key=lambda b: b.size)
        self._call = call
        self._make = make
        self._last: tuple[Shapes, Bucket] | None = None

    def find(self, args: Any, kwargs: Any) -> Bucket | None:
        """The smallest bucket that covers this call; None: there is none yet."""
        shapes = self._call.shapes(args, kwargs)
        if self._last is None or self._last[0] != shapes:
            found = next((b for b in self.found if b.covers(shapes)), None)
            if found is None:
                return None
            self._last = shapes, found
        return self._last[1]

    def add(self, args: Any, kwargs: Any) -> Bucket:
        """Make a bucket for this call; `Infeasible` if no plan fits."""
        made = self._make(args, kwargs)
        self.found = sorted([*self.found, made], key=lambda b: b.size)
        return made


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes of a batch's tensors that vary with its size."""

    rows: int  # rows of the sample
    length: int | None  # tokens per row; None: no such axis
    labels: tuple[tuple[str, ...], ...]  # per tensor and axis: "rows", "length" or ""


def find_axes(batch: Any) -> Axes:
    """Find rows and tokens: the shape that the batch's two-dimensional integer tensors share. `Unsupported` if ambiguous."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
    tables = {tuple(t.shape) for t in tensors if t.dim() == 2 and not t.is_floating_point() and t.shape[1] > 1}
    if len(tables) > 1:
        listed = ", ".join(str(list(shape)) for shape in sorted(tables))
        raise Unsupported(
            f"the batch has two-dimensional tensors of {listed}: which axes grow together cannot be known", hint=_GIVE_BATCHES
        )
    if tables:
        rows, length = next(iter(tables))
        return Axes(rows=rows, length=length, labels=tuple(_labels(t, rows, length) for t in tensors))
    first = {t.shape[0] for t in tensors if t.dim()}
    if len(first) != 1:
        raise Unsupported(
            f"which axis of the batch's tensors ({_listed(tensors)}) is its rows cannot be known", hint=_GIVE_BATCHES
        )
    labels = tuple(("rows",) + ("",) * (t.dim() - 1) if t.dim() else () for t in tensors)
    return Axes(rows=first.pop(), length=None, labels=labels)


def _labels(t: torch.Tensor, rows: int, length: int) -> tuple[str, ...]:
    shape = list(t.shape)
    starts = bool(shape) and shape[0] == rows and (t.dim() != 1 or rows != length)
    rest = shape[1:] if starts else shape
    if t.is_floating_point() and rest.count(length) > 1:
        raise Unsupported(
            f"which axis of a tensor of {shape} grows with the length {length} cannot be known", hint=_GIVE_BATCHES
        )
    if t.dim() == 1 and rows == length and shape[0] == rows:
        raise Unsupported(f"a tensor of {shape} may have one entry per row or per token: both are {rows}", hint=_GIVE_BATCHES)
    return (*(("rows",) if starts else ()), *("length" if n == length else "" for n in rest))


def resize(batch: Any, axes: Axes, *, rows: int | None = None, length: int | None = None) -> Any:
    """A batch of another size, filled with the sample's values; None: as in the sample."""
    if length is not None and axes.length is None:
        shapes = _listed([t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)])
        raise Unsupported(f"which axis of the batch's tensors ({shapes}) is its length cannot be known", hint=_GIVE_BATCHES)
    size = {"rows": rows or axes.rows, "length": length or axes.length}
    leaves, spec = tree_flatten(batch)
    labels = iter(axes.labels)
    made: dict[int, torch.Tensor] = {}  # ids and labels are often one tensor, and stay one
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            own = next(labels)
            if id(leaf) not in made:
                made[id(leaf)] = _extend(leaf, [size.get(label) for label in own])
            leaves[n] = made[id(leaf)]
    return tree_unflatten(leaves, spec)


def _extend(t: torch.Tensor, sizes: Sequence[int | None]) -> torch.Tensor:
    """Repeat the values along each axis; positions continue counting."""
    for dim, size in enumerate(sizes):
        if size is None or size == t.shape[dim]:
            continue
        if _counts(t, dim) and size > t.shape[dim]:
            more = torch.arange(1, size - t.shape[dim] + 1, device=t.device, dtype=t.dtype)
            last = t.narrow(dim, t.shape[dim] - 1, 1)
            t = torch.cat([t, last + more.view([-1 if d == dim else 1 for d in range(t.dim())])], dim)
        else:
            at = torch.arange(size, device=t.device) % t.shape[dim]
            t = t.detach().index_select(dim, at)
    return t


def _counts(t: torch.Tensor, dim: int) -> bool:
    """Does it increase by one along an axis, as positions do?"""
    if t.is_floating_point() or t.dtype == torch.bool or t.shape[dim] < 2 or t.device.type == "meta":
        return False
    return bool((t.diff(dim=dim) == 1).all())


def _listed(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)


def round_up(size: int, base: int) -> int:
    """The smallest of base, 1.25 base, 1.25^2 base, ... that is at least `size`; sizes up to base are returned unchanged."""
    reached = float(base)
    while size > math.ceil(reached):
        reached *= _STEP
    return max(size, math.ceil(reached)) if size > base else size


def met(call: tuple[Any, Any], sample: Axes | None) -> list[tuple[Axes, int, int | None] | None]:
    """Sizes to plan for at this call: rounded up from the sample's, then its own; None: the call as it is."""
    try:
        axes = find_axes(call)
    except Unsupported:
        return [None]
    rows = round_up(axes.rows, sample.rows if sample is not None else axes.rows)
    base = sample.length if sample is not None else axes.length
    length = round_up(axes.length, base) if axes.length is not None and base is not None else axes.length
    exact = (axes, axes.rows, axes.length)
    return [exact] if (rows, length) == exact[1:] else [(axes, rows, length), exact]


def first_that_goes(makers: Iterable[Callable[[], Bucket]]) -> Bucket:
    """The result of the first maker that finds a plan; otherwise raises the last one's error."""
    error: HoldallError | None = None
    for make in makers:
        try:
            return make()
        except HoldallError as wrong:
            error = wrong
    assert error is not None
    raise error
