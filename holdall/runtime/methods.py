"""A method of one module alone, for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def put_method(module: torch.nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Another method for one module alone; returns what takes it away."""
    before = module.__dict__.get(name)
    module.__dict__[name] = method

    def undo() -> None:
        if before is not None:
            module.__dict__[name] = before
        else:
            del module.__dict__[name]

    return undo
