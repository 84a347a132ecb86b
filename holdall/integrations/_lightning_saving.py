"""Saving and resuming of Lightning's Trainer whose module is in shards over processes.

All processes pass the calls by which its strategy collects a module's weights and an optimizer's states; so these gather whole
ones there, and the first process writes them into Lightning's usual file, which any process loads, with and without holdall.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdall.checkpoints.trainers import read_whole_states, whole_states, whole_weights
from holdall.sharded import is_in_shards


class LightningSaving:
    """Takes the place of three calls of a strategy, for as long as there is one: the module stays in shards after training."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._plain: dict[str, Callable[..., Any]] = {}
        self._waiting: Any = None  # states that the first step is to load
        for name in ("lightning_module_state_dict", "optimizer_state", "load_optimizer_state_dict"):
            self._plain[name] = getattr(strategy, name)
            setattr(strategy, name, getattr(self, name))

    def load_waiting_states(self, optimizer: Any) -> None:
        """Load the states of the checkpoint that the trainer resumes from, once the module is in shards."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            read_whole_states(optimizer, waiting)

    # in the place of the strategy's

    def lightning_module_state_dict(self) -> Any:
        module = self._strategy.lightning_module
        if not is_in_shards(module):
            return self._plain["lightning_module_state_dict"]()
        return whole_weights(module, keep=self._strategy.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> Any:
        if not is_in_shards(self._strategy.lightning_module):
            return self._plain["optimizer_state"](optimizer)
        return whole_states(getattr(optimizer, "_optimizer", optimizer), keep=self._strategy.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._waiting = checkpoint["optimizer_states"][0]
