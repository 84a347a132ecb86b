"""A method of one module alone, for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

_put: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, Any]]] = weakref.WeakKeyDictionary()  # with what was before


def put_method(module: torch.nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Another method for one module alone; returns what takes it away."""
    before = module.__dict__.get(name)
    module.__dict__[name] = method
    entry = (name, before)
    _put.setdefault(module, []).append(entry)

    def undo() -> None:
        _put[module].remove(entry)
        if before is not None:
            module.__dict__[name] = before
        else:
            del module.__dict__[name]

    return undo


def without_methods(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a module holds, with the methods that it had before any was put there."""
    plain = dict(state)
    for name, before in reversed(_put.get(module, ())):
        plain.pop(name, None)
        if before is not None:
            plain[name] = before
    return plain
