"""Forwards without gradients: how they are entered, and what memory they lend to weights that come and go.

No backward follows an evaluation, so the homes return to the modules as soon as its forward is over. As a rule it begins with a
call of the model, which the harness hears of. It may also begin below: PEFT's `generate` calls a module that holds the blocks
by itself, so every such module is an entry, too.

How much of the device's memory weights may keep from one evaluation to the next is the lender's business (`weight_cache.py`),
who is also told of the forwards of steps, for which it gives everything back. Without a lender, weights go as soon as they
were used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from holdall.runtime.states.unit import PlacedUnit
from holdall.runtime.states.weight_cache import Lender
from holdall.runtime.states.weight_streaming import Streaming
from holdall.runtime.switching.submodule_calls import holders


class Forwards(Protocol):
    """Who gives modules their working weights for a forward, and the homes after it."""

    @property
    def is_swapped(self) -> bool: ...

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]: ...

    def end_forward(self, *, failed: bool = False) -> None: ...


class Evaluating:
    """Told of every forward by its owner, whom it tells of those that did not begin with the model."""

    def __init__(self, forwards: Forwards, streaming: Streaming) -> None:
        self._forwards = forwards
        self._streaming = streaming
        self.lender: Lender | None = None  # of memory to weights, in evaluations; the harness knows what there is
        self._entered: torch.nn.Module | None = None  # by which an evaluation came that the model itself was not called for

    # entries below the model

    def watch(self, model: torch.nn.Module, calls: Sequence[str]) -> list[Callable[[], object]]:
        """Hear of modules that hold blocks when they are called by themselves; returns what ends this."""
        undo: list[Callable[[], object]] = []
        for module in holders(model, calls):
            undo.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True).remove)
            undo.append(module.register_forward_hook(self._exit, always_call=True).remove)
        return undo

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A module that holds blocks is called by itself, as by PEFT's `generate`: that is an evaluation, too."""
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
        """Other weights are about to come."""
        if self.lender is not None:
            self.lender.look()

    def leave(self, unit: PlacedUnit) -> None:
        """A unit was just used."""
        if self.lender is not None:
            self.lender.leave(unit)
        else:
            self._streaming.release(unit)

    def end(self, *, failed: bool) -> list[PlacedUnit]:
        """An evaluation is over, or some forward failed; returns the units whose weights stay on the device."""
        kept: list[PlacedUnit] = []
        if self.lender is not None and not failed:
            self.lender.end()
            kept = self.lender.lent
        return kept
