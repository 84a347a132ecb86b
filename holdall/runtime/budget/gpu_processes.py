"""GPU memory of other processes, so that it is not charged to this one's budget."""

from __future__ import annotations

import os

import torch

from holdall.units import MiB

_OWN_SHARE = 64 * MiB  # driver memory per process that its list leaves out; more belongs to a process that just started
_shares: dict[torch.device, int] = {}  # the least that was seen


def own_bytes(device: torch.device) -> int | None:
    """This process's bytes on the GPU by the driver's list; None: the list cannot be read.

    The list cannot be read without `pynvml`, or in a container that hides process ids.
    """
    taken = _taken(device)
    own = taken.get(os.getpid())
    if not own:
        return None
    free, total = torch.cuda.mem_get_info(device)
    nobodys = (total - free - sum(taken.values())) // len(taken)
    if 0 < nobodys < _shares.get(device, _OWN_SHARE):  # while others come and go it is too much: a limit would fall in mid-run
        _shares[device] = nobodys
    return own + _shares.get(device, 0)


def _taken(device: torch.device) -> dict[int, int]:
    """Bytes per process id; empty: unknown."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return {p.pid: int(p.usedGpuMemory or 0) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except (pynvml.NVMLError, AttributeError):
        return {}
    finally:
        pynvml.nvmlShutdown()
