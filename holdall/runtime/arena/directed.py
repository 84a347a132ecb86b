"""Memory of an eviction policy with addresses (Coop, MegTaiChi): the results of an op lie where the policy has made room."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from holdall.errors import Unsupported
from holdall.runtime.arena.library import load, table
from holdall.runtime.arena.step_arena import ArenaCounts

ALIGN = 64  # bytes; torch aligns memory on the host by it


class DirectedArena:
    """In use from `on` to `off`; on a CPU. Requests that nothing was said about are torch's."""

    def __init__(self, size: int) -> None:
        self.size = max(size, ALIGN)
        self._library = load()
        self._handle = self._library.holdall_arena_make(0, 0, 0, self.size, ALIGN, 1, *table((), (), ()))
        if not self._handle:
            raise Unsupported("there is no memory for the arena", hint="leave `real` out")

    def __enter__(self) -> DirectedArena:
        if self._library.holdall_arena_hook(self._handle):
            raise Unsupported("another arena is in use", hint="leave `real` out, or close the other harness first")
        self._library.holdall_arena_begin(self._handle, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.holdall_arena_end(self._handle)
        self._library.holdall_arena_unhook(self._handle)

    def poison(self) -> None:
        """Fill memory with NaN when it is freed."""
        self._library.holdall_arena_poison(self._handle, None, None)

    @contextmanager
    def at(self, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Requests of these sizes are served at these addresses, each once: pairs (offset, bytes)."""
        self._replan([size for _, size in ranges], [offset for offset, _ in ranges])
        try:
            yield
        finally:
            self._replan([], [])

    def _replan(self, sizes: list[int], offsets: list[int]) -> None:
        self._library.holdall_arena_replan(self._handle, *table(tuple(sizes), tuple(offsets), ()))

    def offset_of(self, storage: torch.UntypedStorage | None) -> int | None:
        """Where a storage lies; None: outside."""
        if storage is None:
            return None
        offset = storage.data_ptr() - int(self._library.holdall_arena_base(self._handle))
        return offset if 0 <= offset < self.size else None

    @property
    def counts(self) -> ArenaCounts:
        found = (ctypes.c_int64 * len(ArenaCounts()))()
        self._library.holdall_arena_counts(self._handle, found)
        return ArenaCounts(*found)

    def close(self) -> None:
        """Memory that tensors still use stays until they are gone."""
        if self._handle:
            self._library.holdall_arena_drop(self._handle)
            self._handle = None
