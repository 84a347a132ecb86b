"""What the process holds besides the model, which plans leave to it: on the host, and on the GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from holdall.types.layout import allocated_bytes


def besides_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, device: torch.device
) -> dict[str, int]:
    """Both, for a trace; nothing where no GPU computes."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "process": own_bytes(model, optimizer) if on_gpu else 0,
        "besides": bytes_besides(model, optimizer, batch, device) if on_gpu else 0,
    }


def own_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Memory of this process that is not the model's: Python, torch and its libraries, and what the user holds besides.

    Model and states may go elsewhere, and are counted where the plan has them.
    """
    there = _sizes(_of_training(model, optimizer), "cpu")
    return max(0, int(psutil.Process().memory_info().rss) - sum(there))


def bytes_besides(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, device: torch.device) -> int:
    """Memory of the GPU in tensors that are not this training's: a second model, an average of the weights.

    Not counted are those that nobody can reach any more, and workspaces of libraries, which machines are measured with.
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
    """Of every storage on that kind of device."""
    return {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if t.device.type == device)}.values()
