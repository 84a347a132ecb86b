"""Makes real tensors to run a traced op alone: shapes and strides as traced, values as in a typical step.

The time of some kernels depends on values. An `index_put` with all indices zero adds into one row and is a hundred times slower
than one over many rows; a grouped product with empty groups computes nothing. So indices are spread over the indexed dimension,
and groups have equal sizes; other integers are zero, and floats are normally distributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class InputLike:
    """A tensor's layout, without keeping the tensor alive."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(t: torch.Tensor) -> InputLike:
        return InputLike(tuple(t.shape), tuple(t.stride()), t.dtype, t.device)

    def make(self, *, on_host: bool) -> torch.Tensor:
        """Make the tensor. `on_host`: integers without a dimension (seeds of attention kernels) are on the CPU."""
        is_single = not self.shape and not self.dtype.is_floating_point
        device = torch.device("cpu") if is_single and on_host else self.device
        is_narrow = self.dtype.is_floating_point and self.dtype.itemsize == 1  # 8-bit floats cannot be drawn
        flat = torch.empty(self.elements, dtype=torch.bfloat16 if is_narrow else self.dtype, device=device)
        filled = flat.normal_() if self.dtype.is_floating_point else flat.zero_()
        return filled.to(self.dtype).as_strided(self.shape, self.stride)  # an expanded tensor cannot be filled itself

    @property
    def elements(self) -> int:
        """Elements of the memory that the tensor spans."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


def describe(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with every tensor replaced by its description."""
    described: tuple[Any, Any] = tree_map_only(torch.Tensor, InputLike.of, (args, kwargs))
    return described


def make_inputs(func: Any, described: tuple[Any, Any], *, on_host: bool) -> tuple[Any, Any]:
    """Arguments for `func` from their description."""
    args, kwargs = tree_map_only(InputLike, lambda like: like.make(on_host=on_host), described)
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for index, size in _indices(given):
        memory = index.as_strided((InputLike.of(index).elements,), (1,))
        if memory.numel() and size > 0:
            memory.copy_(torch.randperm(memory.numel(), device=index.device) % size)
    _split_groups(given)
    return args, kwargs


def _indices(given: dict[str, Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Every index tensor with the size of the dimension that it indexes."""
    base, index, indices, target = (given.get(name) for name in ("self", "index", "indices", "target"))
    if isinstance(base, torch.Tensor) and isinstance(indices, (list, tuple)):  # index, index_put
        yield from ((i, base.shape[n]) for n, i in enumerate(indices) if _is_index(i))
    elif _is_index(indices):  # embedding and its backward
        weight, rows = given.get("weight"), given.get("num_weights")
        yield indices, weight.shape[0] if isinstance(weight, torch.Tensor) else int(rows or 0)
    if isinstance(base, torch.Tensor) and base.dim() and _is_index(index) and isinstance(given.get("dim"), int):
        yield index, base.shape[given["dim"]]  # gather, scatter, index_select, index_add
    if isinstance(base, torch.Tensor) and base.dim() and _is_index(target):  # nll_loss
        yield target, base.shape[1 if base.dim() > 1 else 0]


def _is_index(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.dtype in (torch.int64, torch.int32)


def _split_groups(given: dict[str, Any]) -> None:
    """Equal groups for a grouped product: `offs` holds the end of each."""
    offsets, left, right = given.get("offs"), given.get("self"), given.get("mat2")
    if not _is_index(offsets) or not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return
    rows = left.shape[0] if right.dim() == 3 else left.shape[1]
    total = right.shape[-1] if left.dim() == 3 else rows
    count = offsets.numel()
    ends = torch.arange(1, count + 1) * (total // count)
    ends[-1] = total
    offsets.copy_(ends)
