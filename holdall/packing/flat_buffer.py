"""A real step on the CPU in one flat buffer: the results of its ops lie at planned offsets, and freed ranges are poisoned.

Every op runs as always; each storage that it makes is then moved to the offset that the arena gives out, so that all later ops
read and write there. When the storage's last reference dies, its range is filled with NaN (bytes of 0xFF) and may be given out
again. If a plan's lifetimes were wrong, values would be lost, or a range would be refused that is still in use: both show.

What is there before a step (weights, optimizer states, the batch) stays where it is.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from holdall.packing.arena import PlannedArena
from holdall.types.layout import PAGE, round_up

_POISON = 0xFF


class FlatBuffer(TorchDispatchMode):
    """Around a step: `with FlatBuffer(arena) as buffer: buffer.begin_step(); ...`. One thread runs forward and backward."""

    supports_higher_order_operators = True

    def __init__(self, arena: PlannedArena) -> None:
        super().__init__()
        self.arena = arena
        whole = np.full(arena.size + PAGE, _POISON, np.uint8)
        begin = round_up(whole.ctypes.data, PAGE) - whole.ctypes.data
        self.bytes = whole[begin : begin + arena.size]
        self._gone: deque[int] = deque()
        self._ranges: dict[int, tuple[int, int] | None] = {}  # key of a live request -> its range; None: outside
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._keys = 0

    def begin_step(self) -> None:
        self._settle()
        self.arena.begin_step()

    @property
    def base(self) -> int:
        """The address of the buffer."""
        return int(self.bytes.ctypes.data)

    def live(self) -> list[tuple[int, int]]:
        """The ranges in use, by address."""
        self._settle()
        return sorted(taken for taken in self._ranges.values() if taken is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        self._settle()
        moved: dict[int, torch.UntypedStorage | None] = {}
        return tree_map(lambda t: self._move(t, given, moved) if isinstance(t, torch.Tensor) else t, out)

    def _move(self, tensor: torch.Tensor, given: set[int], moved: dict[int, torch.UntypedStorage | None]) -> torch.Tensor:
        """The tensor in the buffer; the tensor itself, if an op was given its storage or if it has no room there."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in given or not storage.nbytes() or key in self._watched:
            return tensor
        if key not in moved:
            moved[key] = self._placed(storage)
        placed = moved[key]
        if placed is None:
            return tensor
        found = torch.empty(0, dtype=tensor.dtype)
        return found.set_(placed, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _placed(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """A copy of the storage at the next planned offset; None: it stays, and is counted with the fallback."""
        self._keys += 1
        key, size = self._keys, storage.nbytes()
        offset = self.arena.alloc(key, size)
        if offset is None:
            self._watch(key, storage, None)
            return None
        part = torch.frombuffer(self.bytes, dtype=torch.uint8, count=size, offset=offset)
        placed = part.untyped_storage()
        placed.copy_(storage)
        self._watch(key, placed, (offset, offset + size))
        return placed

    def _watch(self, key: int, storage: torch.UntypedStorage, taken: tuple[int, int] | None) -> None:
        self._ranges[key] = taken
        known = storage._cdata

        def die(_: Any) -> None:
            self._watched.pop(known, None)
            self._gone.append(key)

        self._watched[known] = weakref.ref(storage, die)

    def _settle(self) -> None:
        """Free and poison what died since the last op."""
        while self._gone:
            key = self._gone.popleft()
            self.arena.free(key)
            taken = self._ranges.pop(key)
            if taken is not None:
                self.bytes[taken[0] : taken[1]] = _POISON
