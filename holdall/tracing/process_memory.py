"""Memory of the process outside this training, on the host and on the GPU, which plans leave free."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from holdall.types.layout import allocated_bytes


@dataclass(frozen=True, kw_only=True)
class OtherMemory:
    """Bytes in use outside of the training; see the fields of the same names in `TraceInfo`."""

    process: int = 0
    besides: int = 0


def other_memory(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, device: torch.device
) -> OtherMemory:
    """Both, for a trace; none if no GPU computes."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return OtherMemory()
    return OtherMemory(process=own_bytes(model, optimizer), besides=bytes_besides(model, optimizer, batch, device))


def own_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Host memory of this process besides the model: Python, torch, its libraries, and the user's other data.

    Model and optimizer states are not counted: the plan places them.
    """
    there = _sizes(_of_training(model, optimizer), "cpu")
    return max(0, int(psutil.Process().memory_info().rss) - sum(there))


def bytes_besides(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, device: torch.device) -> int:
    """GPU memory of tensors outside this training: a second model, an average of the weights.

    Unreachable tensors are not counted, nor workspaces of libraries, which the probe measures.
    """
    if not torch.cuda.is_initialized():
        return 0
    gc.collect()
    if (clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None)) is not None:
        clear()
    tensors = [*_of_training(model, optimizer), *(t for t in tree_leaves(batch) if isinstance(t, torch.Tensor))]
    own = sum(allocated_bytes(size, device.type) for size in _sizes(tensors, device.type))
    return max(0, torch.cuda.memory_allocated(device) - own)


def _of_training(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return tensors


def _sizes(tensors: Iterable[torch.Tensor], device: str) -> Iterable[int]:
    """Bytes of every storage on that kind of device."""
    return {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if t.device.type == device)}.values()
