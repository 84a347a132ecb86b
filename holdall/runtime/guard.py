"""Nobody reads a parameter whose update is still under way.

The guard looks at ops of the loop, not at those of forward and backward: these would become slow. The engine knows where its
forwards begin and end; of backwards it hears by `watch_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter

from holdall.optim._interception import Interception, current_backward
from holdall.runtime.gradients import Gradient
from holdall.runtime.ledger import Ledger


class Guard(TorchDispatchMode):
    """On while the loop is by itself and updates are under way: an op that touches a home waits for its update."""

    supports_higher_order_operators = True

    def __init__(self, touched: Callable[[int], None]) -> None:
        super().__init__()
        self._touched = touched  # told the key of every storage that an op is about to use
        self._is_up = False
        self._is_on = False

    def can_rise(self) -> bool:
        """Not inside of somebody else's mode: whoever left that would take this one from the stack in its place."""
        top = _get_current_dispatch_mode()
        return self._is_up or top is None or isinstance(top, (Guard, Ledger))

    def rise(self) -> None:
        self._is_on = True
        if not self._is_up:
            self._is_up = True
            self.__enter__()

    def lower(self) -> None:
        """Off; taken from the stack as soon as nothing lies above it there."""
        self._is_on = False
        if self._is_up and _get_current_dispatch_mode() is self:
            self._is_up = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_on:
            for t in tree_iter((args, kwargs)):
                if isinstance(t, torch.Tensor) and not isinstance(t, Gradient):
                    self._touched(t.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


class Watcher(Protocol):
    def before_backward(self) -> None: ...

    def after_backward(self) -> None: ...


def _backward(original: Callable[..., None], watching: list[Watcher], *args: Any, **kwargs: Any) -> None:
    if current_backward() >= 0:  # not of the loop
        watching = []
    for watcher in watching:
        watcher.before_backward()
    try:
        original(*args, **kwargs)
    finally:
        for watcher in watching:
            watcher.after_backward()


_calls: Interception[Watcher] = Interception(torch.autograd, "backward", _backward)
watch_calls, unwatch_calls = _calls.watch, _calls.unwatch
