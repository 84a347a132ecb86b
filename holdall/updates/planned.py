"""The models with a plan installed. Kept here for optimizers that traverse a graph twice, which may not import the runtime."""

from __future__ import annotations

import weakref

import torch

from holdall.errors import Unsupported

PLANNED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def refuse_planned(model: torch.nn.Module) -> None:
    """A second plan on a model would wrap what the first has wrapped."""
    if model in PLANNED:
        raise Unsupported(
            f"this {type(model).__name__} is under a plan already",
            hint="call `close()` on its harness first, or use the harness in a `with` block",
        )
