"""What other processes take of a GPU, so that it is not charged to the budget of this one."""

from __future__ import annotations

import os

import torch


def own_bytes(device: torch.device) -> int | None:
    """What this process takes of the GPU, by the driver's list; None: it is alone there, or that cannot be told.

    It cannot where `pynvml` is not installed, and in a container that hides its processes' numbers from them.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        taken = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except (pynvml.NVMLError, AttributeError):
        return None
    finally:
        pynvml.nvmlShutdown()
    own = taken.get(os.getpid())
    return int(own) if own and len(taken) > 1 else None
