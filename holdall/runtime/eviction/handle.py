"""A handle replaces a tensor that may be evicted: shape, strides, dtype, and a cell that knows the bytes.

Handles are made below autograd, so autograd saves handles too. All handles of one storage share a `Cell`; when the last handle
dies, so does the cell, and the pool is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from holdall.runtime.eviction.storages import Storage

if TYPE_CHECKING:
    from holdall.runtime.eviction.evictor import Evictor
    from holdall.runtime.eviction.pool import EvictionPool

Geometry = tuple[Any, ...]  # (shape, strides, offset, dtype)


class Cell:
    """One storage as the program sees it; an in-place op replaces `value`."""

    __slots__ = ("__weakref__", "pool", "value")

    def __init__(self, value: Storage, pool: EvictionPool) -> None:
        self.value = value
        self.pool: EvictionPool | None = pool  # None: the pool no longer manages the bytes

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.release(self.value)


class Handle(torch.Tensor):
    """A tensor whose bytes may be evicted. Works wherever a tensor works; `plain()` returns an ordinary one."""

    cell: Cell
    evictor: Evictor

    __slots__ = ("cell", "evictor")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, offset: Any, cell: Cell, evictor: Evictor, device: torch.device) -> Handle:
        made: Handle = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), storage_offset=offset, dtype=like.dtype, device=device
        )
        made.cell = cell
        made.evictor = evictor
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        for x in torch.utils._pytree.tree_iter((args, kwargs)):
            if isinstance(x, Handle):
                return x.evictor.dispatch(func, args, kwargs)
        raise AssertionError("no handle among the arguments")

    def plain(self) -> torch.Tensor:
        """An ordinary tensor over the same bytes, recomputed if evicted. Not differentiable."""
        return self.evictor.plain(self)

    # methods that bypass the dispatcher

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain().requires_grad_(self.requires_grad).numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{self.plain()!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().clone().requires_grad_(self.requires_grad and self.is_leaf).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError("only tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
        return self.plain().clone().requires_grad_(self.requires_grad)


def geometry(t: torch.Tensor) -> Geometry:
    return t.shape, t.stride(), t.storage_offset(), t.dtype


def over(storage: Any, form: Geometry) -> torch.Tensor:
    """An ordinary tensor of this geometry over a storage's bytes."""
    shape, stride, offset, dtype = form
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
