"""Keys and values that models keep for decoding (`use_cache`, on by default in Hugging Face's configs), left out of training.

Nothing in a training step reads this cache. It costs a copy of all keys and values, keeps them alive as long as the loop holds
the model's output, and hides from planners what a block does. So a forward with gradients is run as with `use_cache=False`, in
the trace and under a harness alike. The loss and the gradients are the same.

A call that asks for the cache (`use_cache=True` among its arguments) gets it. So do models with state spaces, which compute in
another way with a cache; and every forward without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_STATE_SPACE = "A_log"  # the decay of a state space, in Mamba and what descends from it


def caching_configs(model: torch.nn.Module) -> list[Any]:
    """The configs in a model, each once, that make it cache keys and values in training."""
    if any(name.endswith(_STATE_SPACE) for name, _ in model.named_parameters()):
        return []
    found = {id(config): config for module in model.modules() if (config := module.__dict__.get("config")) is not None}
    return [config for config in found.values() if getattr(config, "use_cache", None) is True]


def train_without_cache(model: torch.nn.Module) -> Callable[[], None]:
    """Switch the cache off during every forward with gradients. Returns a function that undoes it."""
    configs = caching_configs(model)
    if not configs:
        return _nothing

    def off(*_: Any) -> None:
        if torch.is_grad_enabled():
            for config in configs:
                config.use_cache = False

    def on(*_: Any) -> None:
        for config in configs:
            config.use_cache = True

    handles = [model.register_forward_pre_hook(off), model.register_forward_hook(on, always_call=True)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _nothing() -> None:
    """The model keeps no cache."""
