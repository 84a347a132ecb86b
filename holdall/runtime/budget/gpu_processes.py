"""What other processes take of a GPU, so that it is not charged to the budget of this one."""

from __future__ import annotations

import os

import torch

from holdall.units import MiB

_OWN_SHARE = 64 * MiB  # of what the driver takes for a process and counts to none; more is somebody's who came in between


def own_bytes(device: torch.device) -> int | None:
    """What this process takes of the GPU, by the driver's list; None: it is alone there, or that cannot be told.

    It cannot where `pynvml` is not installed, and in a container that hides its processes' numbers from them.
    """
    taken = _taken(device)
    own = taken.get(os.getpid())
    if not own or len(taken) == 1:
        return None
    free, total = torch.cuda.mem_get_info(device)
    nobodys = (total - free - sum(taken.values())) // len(taken)
    return own + (nobodys if 0 < nobodys < _OWN_SHARE else 0)


def _taken(device: torch.device) -> dict[int, int]:
    """Bytes by process number; empty: not known."""
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
