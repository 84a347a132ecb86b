"""Clips offloaded gradients by their norms, all in one call.

torch's `clip_grad_norm_` takes gradients of any class but its own one by one, and moves every norm by itself: for 1,259
parameters 57 ms of a step in which the GPU waits. Its two halves are module functions, which it looks up at each call; these
are replaced while states are placed, however the loop imported the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from holdall.runtime.states.gradients.offloaded import Gradient
from holdall.updates.interception import Interception


class HasMasters(Protocol):
    def master_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The master of a working copy; any other tensor is returned as it is."""
        ...


def _total_norm(original: Callable[..., Any], _: list[HasMasters], tensors: Any, norm_type: float = 2.0, *rest: Any) -> Any:
    """torch's `_get_total_norm`: the same norms in the same order, without asking for each."""
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not any(type(g) is Gradient for g in grads) or float(norm_type) != 2 or (rest and rest[0]):
        return original(grads, norm_type, *rest)
    with torch._C.DisableTorchFunction():
        device = grads[0].device
        norms = [n for n in (_norm(g, device) for g in grads) if n is not None]
        if len(norms) == len(grads):
            return torch.linalg.vector_norm(torch.stack([n if n.device == device else n.to(device) for n in norms]))
    return original(grads, norm_type, *rest)


def _norm(grad: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    if type(grad) is Gradient:
        return grad.source.known_norm(grad.place, device) if grad.is_untouched else None
    found: torch.Tensor = torch.linalg.vector_norm(grad)
    return found


def _scale(
    original: Callable[..., None],
    watching: list[HasMasters],
    parameters: Any,
    max_norm: float,
    total_norm: torch.Tensor,
    *rest: Any,
) -> None:
    """torch's `_clip_grads_with_norm_`: offloaded gradients remember the factor."""
    asked: Iterable[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    with torch._C.DisableTorchFunction():
        masters = _masters(asked, watching)
        away = [p.grad for p in masters if type(p.grad) is Gradient]
        here = [p for p in masters if p.grad is not None and type(p.grad) is not Gradient]
        if away:  # a parameter whose gradient is 1 gets the factor itself, as torch computes it
            unit = torch.nn.Parameter(torch.zeros_like(total_norm))
            unit.grad = torch.ones_like(total_norm)
            here.append(unit)
        original(here, max_norm, total_norm, *rest)
        for grad in away:
            grad.times(unit.grad)  # type: ignore[union-attr]


def _masters(parameters: Iterable[torch.Tensor], watching: Sequence[HasMasters]) -> list[torch.Tensor]:
    found = list(parameters)
    for watcher in watching:
        found = [watcher.master_of(p) for p in found]
    return found


_norms: Interception[HasMasters] = Interception(clip_grad, "_get_total_norm", _total_norm)
_scales: Interception[HasMasters] = Interception(clip_grad, "_clip_grads_with_norm_", _scale)


def watch_clipping(watcher: HasMasters) -> Callable[[], None]:
    """Clip in one call from now on; returns the undo function."""
    if not hasattr(clip_grad, "_get_total_norm") or not hasattr(clip_grad, "_clip_grads_with_norm_"):
        return lambda: None  # another version of torch: each gradient answers for itself
    ends = _norms.watch(watcher), _scales.watch(watcher)

    def unwatch() -> None:
        for end in ends:
            end()

    return unwatch


def unwatch_clipping() -> None:
    """Stop watching for watchers that were garbage-collected."""
    _norms.unwatch()
    _scales.unwatch()
