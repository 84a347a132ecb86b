"""Intercepts `torch.autograd.backward` (which `Tensor.backward` calls) while any harness can retry steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdall.runtime.switching.retry import Repeat
from holdall.updates.interception import Interception


def _backward(
    original: Callable[..., None],
    watching: list[Repeat],
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    given = {"retain_graph": retain_graph, "create_graph": create_graph, "grad_variables": grad_variables, "inputs": inputs}
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    pending = [r for r in watching if r._latest is not None and not r._is_inside]
    if len(pending) == 1 and _is_plain(tensors):
        pending[0].backward(original, tensors, grad_tensors, options)
    else:  # of no harness, or of two models at once: it is unclear whose step to retry
        original(tensors, grad_tensors, **options)


def _is_plain(tensors: Any) -> bool:
    """Are these tensors, not graph edges?"""
    items = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return isinstance(items, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in items)


_function: Interception[Repeat] = Interception(torch.autograd, "backward", _backward)
watch_backward, unwatch_backward = _function.watch, _function.unwatch
