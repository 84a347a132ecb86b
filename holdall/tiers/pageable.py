"""Host memory that is not pinned: the system may move and swap it, and may have far more of it than it lets be pinned.

A GPU's bytes pass through pinned staging buffers, so they come and go at the rate at which the host copies memory, and its
processors do the copying.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from holdall.tiers import Ticket
from holdall.tiers._buffers import Buffer, Buffers, bytes_of
from holdall.tiers._staged import StagedStore

_THREADS = 4  # in each direction; one core does not fill the memory's channels


class Pageable(StagedStore):
    name: ClassVar[str] = "pageable"
    serves: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})

    def __init__(self, *, capacity: int | None = None, device: torch.device | str = "cpu") -> None:
        super().__init__(device=device, depth=_THREADS)
        self._buffers: Buffers = Buffers(self.name, capacity)
        self._own(self._buffers.clear)

    def _write(self, room: Buffer, begin: int, address: int, nbytes: int) -> None:
        ctypes.memmove(room.storage.data_ptr() + begin, address, nbytes)

    def _read(self, room: Buffer, begin: int, address: int, nbytes: int) -> None:
        ctypes.memmove(address, room.storage.data_ptr() + begin, nbytes)

    def memory(self, ticket: Ticket) -> torch.Tensor:
        return bytes_of(ticket.buffer.storage)
