"""Caches of keys and values (`past_key_values`) that a model fills as it trains, for blocks that are run again.

Hugging Face models make a cache in every forward unless `use_cache=False` says not to, and every layer adds its keys to it. A
layer that is run again must find the cache as it was before its call: else it would attend to its own keys twice, or take
those of the first run instead of computing them. What it adds then goes to a copy, which goes with the run.

Of the other layers' entries only shapes are remembered: holding them would take memory that no plan knows of.
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
    """Whether it is a cache of transformers, which need not be there."""
    kind: Any = type(value)
    return _is_cache_type(kind)


class CacheBefore:
    """A cache as it was before a call. Made before the call, and told when it is over."""

    def __init__(self, cache: Any) -> None:
        self._cache = _copied(cache)

    def settle(self, cache: Any) -> None:
        """The call is over: forget the values of entries that it did not change."""
        _forget(self._cache, cache)

    def take(self) -> Any:
        """A copy to run the call with again."""
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
