"""What the process itself takes of the host, which plans leave to it."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch


def own_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Memory of this process that is not the model's: Python, torch and its libraries, and what the user holds besides.

    Model and states may go elsewhere, and are counted where the plan has them.
    """
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return max(0, int(psutil.Process().memory_info().rss) - _on_host(tensors))


def _on_host(tensors: Iterable[torch.Tensor]) -> int:
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if t.device.type == "cpu")}
    return sum(storages.values())
