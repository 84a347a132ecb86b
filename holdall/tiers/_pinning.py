"""Page-locked host memory: a GPU copies to and from it at the full rate of its link, and while it computes."""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from holdall.tiers._buffers import Buffer
from holdall.units import format_bytes

logger = logging.getLogger("holdall")


def pin(notes: list[str], buffer: Buffer) -> None:
    """Register a buffer with CUDA; where that fails it stays pageable, which is right but slow, and a note says so."""
    error = int(torch.cuda.cudart().cudaHostRegister(buffer.storage.data_ptr(), buffer.nbytes, 0))
    buffer.is_pinned = error == 0
    if buffer.is_pinned:
        return
    note = f"{format_bytes(buffer.nbytes)} of host memory could not be pinned (CUDA error {error}); copies to it are slow"
    if not notes:
        logger.warning(note)
    notes.append(note)
    with suppress(RuntimeError), torch._C._DisableTorchDispatch():
        torch.zeros(1, device="cuda")  # the next launch reports the error as its own; let it be this one


def unpin(buffer: Buffer) -> None:
    if buffer.busy is not None:
        buffer.busy.synchronize()
    if buffer.is_pinned:
        torch.cuda.cudart().cudaHostUnregister(buffer.storage.data_ptr())
        buffer.is_pinned = False
