"""Saving and resuming with accelerate when the model is in shards over processes.

`get_state_dict`, which all processes pass, gathers whole weights on the first: so `save_model` writes them, and
`save_pretrained(..., state_dict=accelerator.get_state_dict(model))`. `save_state` and `load_state` leave schedulers, loaders of
data and random numbers to accelerate, and have model and optimizer in a checkpoint of their own, `FOLDER/holdall`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from holdall.checkpoints.trainers import BESIDE, load_states, save_states, whole_weights
from holdall.errors import Unsupported


class AcceleratorSaving:
    """Takes the place of three calls of an accelerator, as long as there is one: the model stays in shards."""

    def __init__(self, accelerator: Any, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._plain: dict[str, Callable[..., Any]] = {}
        for name in ("get_state_dict", "save_state", "load_state"):
            self._plain[name] = getattr(accelerator, name)
            setattr(accelerator, name, getattr(self, name))

    def keep_alone(self) -> Callable[[], object]:
        """Refuse `model.save_pretrained` without whole weights; returns the function that ends it."""
        plain = getattr(self._model, "save_pretrained", None)
        if plain is None:
            return lambda: None

        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("state_dict") is None:
                what = "the model is in shards over processes, which one of them cannot gather"
                raise Unsupported(what, hint="pass state_dict=accelerator.get_state_dict(model), made on all processes")
            return plain(*args, **kwargs)

        self._model.save_pretrained = save_pretrained
        return lambda: self._model.__dict__.pop("save_pretrained", None)

    # in the place of the accelerator's

    def get_state_dict(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._accelerator.unwrap_model(model, keep_torch_compile=False) is not self._model:
            return self._plain["get_state_dict"](model, *args, **kwargs)
        return whole_weights(self._model, keep=self._accelerator.is_main_process)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._aside(self._accelerator.register_save_state_pre_hook) as folders:
            location = self._plain["save_state"](*args, **kwargs)
        save_states(Path(folders[0], BESIDE), self._model, self._optimizer, step=self._accelerator.step, weights=True)
        return location

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._aside(self._accelerator.register_load_state_pre_hook) as folders:
            result = self._plain["load_state"](*args, **kwargs)
        load_states(Path(folders[0], BESIDE), self._model, self._optimizer, weights=True)
        return result

    @contextmanager
    def _aside(self, register: Callable[..., Any]) -> Iterator[list[str]]:
        """Hide our optimizer from the accelerator; yields the list that gets the folder in use."""
        found: list[str] = []
        hook = register(lambda *given: found.append(given[-1]))
        own = self._accelerator._optimizers
        self._accelerator._optimizers = [o for o in own if getattr(o, "optimizer", o) is not self._optimizer]
        try:
            yield found
        finally:
            self._accelerator._optimizers = own
            hook.remove()
