"""What forwards that no step counts must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from holdall.attributes import left_as_found


def same_random(device: torch.device) -> AbstractContextManager[None]:
    """Afterwards the random state of the host and of the device is as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def as_if_not_run(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Afterwards the random state, and what modules hold in buffers and Python attributes, is as before."""
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    with same_random(device), ExitStack() as stack:
        stack.callback(_fill, buffers)
        for module in modules:
            stack.enter_context(left_as_found(module))
        yield


@torch.no_grad()
def _fill(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in buffers:
        buffer.copy_(value)
