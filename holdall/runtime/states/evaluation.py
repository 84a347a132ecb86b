"""Forwards without gradients: how they begin, and how they cache streamed weights.

No backward follows an evaluation, so the masters return to the modules right after its forward. Usually it begins with a call
of the model, which the harness sees. It may also begin below: PEFT's `generate` calls a module that contains the blocks
directly, so every such module is an entry point, too.

The lender (`weights/cache.py`) decides how much device memory weights may keep from one evaluation to the next; it is also told
of the forwards of steps, for which it frees everything. Without a lender, weights are freed right after use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.weights.cache import Lender
from holdall.runtime.states.weights.streaming import Streaming
from holdall.runtime.switching.submodule_calls import holders


class Forwards(Protocol):
    """Gives modules their working weights for a forward, and the masters after it."""

    @property
    def is_swapped(self) -> bool: ...

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]: ...

    def end_forward(self, *, failed: bool = False) -> None: ...


class Evaluating:
    """Tracks forwards without gradients, including those that begin below the model."""

    def __init__(self, forwards: Forwards, streaming: Streaming) -> None:
        self._forwards = forwards
        self._streaming = streaming
        self.lender: Lender | None = None  # caches weights in evaluations; set by the harness, which knows the free memory
        self._entered: torch.nn.Module | None = None  # the module through which an evaluation began below the model

    # entries below the model

    def watch(self, model: torch.nn.Module, calls: Sequence[str]) -> list[Callable[[], object]]:
        """Hook the modules that contain blocks, for direct calls; returns the undo functions."""
        undo: list[Callable[[], object]] = []
        for module in holders(model, calls):
            undo.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True).remove)
            undo.append(module.register_forward_hook(self._exit, always_call=True).remove)
        return undo

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A module that contains blocks is called directly, as by PEFT's `generate`: an evaluation begins."""
        if torch.is_grad_enabled() or self._forwards.is_swapped:
            return None
        self._entered = module
        return self._forwards.begin(args, kwargs)

    def _exit(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._entered is module:
            self._entered = None
            self._forwards.end_forward(failed=output is None)

    # memory for weights

    def begin(self, args: Any, kwargs: Any) -> None:
        """A forward begins, with gradients or without."""
        if self.lender is not None:
            self.lender.begin(args, kwargs)

    def look(self) -> None:
        """Other weights are about to be fetched."""
        if self.lender is not None:
            self.lender.look()

    def leave(self, unit: PlacedUnit) -> None:
        """A unit has just been used."""
        if self.lender is not None:
            self.lender.leave(unit)
        else:
            self._streaming.release(unit)

    def end(self, *, failed: bool) -> list[PlacedUnit]:
        """An evaluation is over, or a forward failed; returns the units whose weights stay on the device."""
        kept: list[PlacedUnit] = []
        if self.lender is not None and not failed:
            self.lender.end()
            kept = self.lender.lent
        return kept
