"""Replaces a method on one module for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

_put: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, Any]]] = weakref.WeakKeyDictionary()  # previous ones


def put_method(module: torch.nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one module; returns the function that undoes it."""
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
    """A module's state with its original methods."""
    plain = dict(state)
    for name, before in reversed(_put.get(module, ())):
        plain.pop(name, None)
        if before is not None:
            plain[name] = before
    return plain
