"""A disk: one file in a folder that you name, or one in each of several, with bytes in all of them by turns.

    HOLDALL_NVME=/mnt/fast                  the folder; for several disks, folders with commas between
    HOLDALL_NVME_DEPTH=16                   pieces of 4 MiB in flight in each direction (8)
    HOLDALL_DEBUG=checksums                 every piece is compared with what was written; always under chaos

Bytes pass the system's page cache by (O_DIRECT), where the file system allows. Model states are also mapped as memory, for
whoever reads them between two updates; where a file system does not show a mapping what was written directly, which is tried
when the file is made, what is mapped is copied through the page cache alone. Room is reserved before anything is written
(`_disk_files.py`), and the file goes with its process. When a plan is taken down on a host without room for what lies here,
the model's tensors stay mappings of the file, which has no name any more and goes with the last of them.

From a GPU, bytes pass through pinned buffers of the host: a plan prices that as two hops, at the rate of the slower one, after
the latencies of both.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from pathlib import Path
from typing import ClassVar

import torch

from holdall.errors import InvalidInput
from holdall.tiers import Ticket
from holdall.tiers._chaos import asks_for, current
from holdall.tiers._disk_files import DiskFile, free_bytes
from holdall.tiers._extents import Extent, Extents
from holdall.tiers._staged import DEPTH, PIECE, StagedStore
from holdall.types.layout import PAGE, round_up

_HINT = "free some space, name a folder on another disk in HOLDALL_NVME, or give `nvme` a smaller budget"


class Nvme(StagedStore):
    name: ClassVar[str] = "nvme"
    serves: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    depths: ClassVar[tuple[int, ...]] = (1, 4, 16)

    def __init__(self, *, capacity: int | None = None, device: torch.device | str = "cpu", depth: int | None = None) -> None:
        super().__init__(device=device, depth=depth or _depth())
        self._checks = asks_for("checksums")
        files: list[DiskFile] = []
        try:
            for folder in folders():
                files.append(DiskFile(folder, _HINT))
        except BaseException:
            for file in files:
                file.close()
            raise
        self.notes += [f"`{file.folder}` does not take O_DIRECT" for file in files if not file.is_direct]
        self._buffers: Extents = Extents(self.name, capacity, files, PIECE)
        self._own(self._buffers.clear)

    @classmethod
    def room(cls) -> int:
        """Bytes that the folders have free."""
        return free_bytes(folders())

    @classmethod
    def where(cls) -> str:
        """What was measured once does not hold of other folders."""
        return f"{os.environ.get('HOLDALL_NVME', '')} {_depth()}"

    def prepare(self, nbytes: int) -> None:
        """Reserve so many bytes now, or refuse."""
        self._buffers.prepare(nbytes)

    def memory(self, ticket: Ticket) -> torch.Tensor:
        extent: Extent = ticket.buffer
        if extent.mapped is None:
            self.arrived(ticket)  # past the page cache; from here on through it
            extent.memory()
            chaos = current()
            if chaos is not None and not extent.is_written:
                chaos.poison(extent.memory())
            extent.sums.clear()
        return extent.memory()

    def leave(self, ticket: Ticket) -> None:
        """Let go of bytes that tensors are still made of: those stay as they are."""
        self.arrived(ticket)
        ticket.is_live = False
        ticket.out = ticket.back = ticket.source = ticket.target = None
        if ticket.buffer is not None:
            self._buffers.leave(ticket.buffer)
            ticket.buffer = None

    def _fits(self, room: Extent, address: int, nbytes: int) -> bool:
        return not room.is_direct or not (address % PAGE or nbytes % PAGE)

    def _write(self, room: Extent, begin: int, address: int, nbytes: int) -> None:
        file, offset = room.at(begin)
        direct = room.is_direct and file.is_direct
        room.is_written = True
        for other in [at for at, (size, _) in list(room.sums.items()) if at < begin + nbytes and begin < at + size]:
            room.sums.pop(other, None)
        if room.mapped is None and (self._checks or current() is not None):
            room.sums[begin] = nbytes, zlib.crc32(_view(address, nbytes))
        file.write(offset, _view(address, round_up(nbytes, PAGE) if direct else nbytes), direct=direct)

    def _read(self, room: Extent, begin: int, address: int, nbytes: int) -> None:
        file, offset = room.at(begin)
        direct = room.is_direct and file.is_direct
        file.read(offset, _view(address, round_up(nbytes, PAGE) if direct else nbytes), direct=direct)
        size, checksum = room.sums.get(begin, (0, 0))
        if size == nbytes and zlib.crc32(_view(address, nbytes)) != checksum:
            raise file.corrupt(offset, nbytes)


def folders() -> list[Path]:
    """Those that `HOLDALL_NVME` names."""
    given = [Path(part.strip()).expanduser() for part in os.environ.get("HOLDALL_NVME", "").split(",") if part.strip()]
    if not given:
        raise InvalidInput(
            "the tier `nvme` needs a folder on a local disk",
            hint="name one, as in `export HOLDALL_NVME=/mnt/fast`; for several disks, folders with commas between",
        )
    for folder in given:
        if not folder.is_dir():
            raise InvalidInput(f"HOLDALL_NVME names `{folder}`, which is not a folder", hint=f"mkdir -p {folder}")
    return given


def _depth() -> int:
    given = os.environ.get("HOLDALL_NVME_DEPTH", "").strip() or str(DEPTH)
    if not given.isdigit() or not 0 < int(given) <= 256:
        raise InvalidInput(f"HOLDALL_NVME_DEPTH is {given!r}, not a number from 1 to 256", hint="export HOLDALL_NVME_DEPTH=8")
    return int(given)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
