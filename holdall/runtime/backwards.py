"""While any harness repeats steps, `torch.autograd.backward`, which `Tensor.backward` calls, goes through here."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from holdall.runtime.repeat import Repeat

_watching: weakref.WeakSet[Repeat] = weakref.WeakSet()
_original: list[Callable[..., None]] = []


def watch_backward(repeat: Repeat) -> Callable[[], None]:
    """From here on backwards are watched; returns what ends it."""
    if not _original:
        _original.append(torch.autograd.backward)
        torch.autograd.backward = _backward  # type: ignore[assignment]
    _watching.add(repeat)
    return lambda: unwatch_backward(repeat)


def unwatch_backward(repeat: Repeat | None = None) -> None:
    """One of them less, or those that were collected; with the last, torch has its own function again."""
    if repeat is not None:
        _watching.discard(repeat)
    if not list(_watching) and torch.autograd.backward is _backward:  # else somebody put another in front of it
        torch.autograd.backward = _original.pop()


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    given = {"retain_graph": retain_graph, "create_graph": create_graph, "grad_variables": grad_variables, "inputs": inputs}
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    original = _original[0]
    pending = [r for r in _watching if r._latest is not None and not r._is_inside]
    if len(pending) == 1 and _is_plain(tensors):
        pending[0].backward(original, tensors, grad_tensors, options)
    else:  # nobody's, or of two models at once: whose step it is to repeat cannot be known
        original(tensors, grad_tensors, **options)


def _is_plain(tensors: Any) -> bool:
    """Tensors, rather than edges of a graph."""
    items = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return isinstance(items, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in items)
