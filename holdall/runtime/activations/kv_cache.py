"""Restores key/value caches (`past_key_values`) for blocks that are recomputed.

Hugging Face models fill a cache in every forward unless `use_cache=False`; each layer appends its keys and values. A recomputed
layer must see the cache as it was before its first call: otherwise it would attend to its own keys twice, or reuse those of the
first run. The recomputation appends to a copy, which is dropped afterwards.

Only the shapes of other layers' entries are kept: holding the tensors would take memory that no plan counts.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=256)
def _is_cache_type(kind: type) -> bool:
    return any(c.__name__ == "Cache" and c.__module__ == "transformers.cache_utils" for c in kind.__mro__)


def is_cache(value: Any) -> bool:
    """Is this a cache of transformers? The package need not be installed."""
    kind: Any = type(value)
    return _is_cache_type(kind)


class CacheBefore:
    """A cache as it was before a call. Make it before the call and call `settle` after it."""

    def __init__(self, cache: Any) -> None:
        self._cache = _copied(cache)

    def settle(self, cache: Any) -> None:
        """After the call: drop the values of entries that the call did not change."""
        _forget(self._cache, cache)

    def take(self) -> Any:
        """A copy of the cache for the recomputation."""
        return _copied(self._cache)


def _copied(cache: Any) -> Any:
    made = copy.copy(cache)
    for name, value in vars(cache).items():
        if is_cache(value):
            setattr(made, name, _copied(value))
        elif isinstance(value, list):
            setattr(made, name, [copy.copy(entry) for entry in value])
        elif isinstance(value, dict):
            setattr(made, name, dict(value))
    return made


def _forget(before: Any, after: Any) -> None:
    for name, value in vars(before).items():
        if is_cache(value):
            _forget(value, getattr(after, name))
        elif isinstance(value, list):
            for entry, now in zip(value, getattr(after, name), strict=False):
                if hasattr(entry, "__dict__") and all(getattr(now, k, None) is v for k, v in vars(entry).items()):
                    for k, v in list(vars(entry).items()):
                        setattr(entry, k, _shape_of(v) if isinstance(v, torch.Tensor) and v.dim() else v)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return torch.empty_like(tensor, device="meta")
