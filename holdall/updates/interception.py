"""Replaces a function of torch by ours while anyone watches, and restores it with the last watcher.

There are two, one for each way to a backward: `Tensor.backward` (`optim/_in_backward`: backwards of the loop) and
`torch.autograd.backward`, which the method calls (`runtime/switching/backward_hook.py`: all of them). This module is here
because optimizers work without the runtime.

Another library may have wrapped our function when the last watcher leaves. Then ours cannot be removed: it passes calls on, and
is bypassed as soon as the outer wrapper is removed by us or another watcher arrives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Watcher = TypeVar("Watcher")
Function = Callable[..., Any]

_retired: weakref.WeakKeyDictionary[Function, Function] = weakref.WeakKeyDictionary()  # -> the function it wrapped


def current_backward() -> int:
    """The number of the backward running on this thread; -1: none."""
    return int(torch._C._current_graph_task_id())


class Interception(Generic[Watcher]):
    """Turns calls of `owner.name` into `through(original, watching, *args, **kwargs)`. Watching keeps nobody alive."""

    def __init__(self, owner: Any, name: str, through: Function) -> None:
        self._owner, self._name, self._through = owner, name, through
        self._watching: weakref.WeakSet[Any] = weakref.WeakSet()
        self._put: tuple[Function, Function] | None = None  # (our function, the function that it wraps)
        self._handed = threading.local()  # `.over`: the backward whose call has been passed on to torch

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Report calls to the watcher; returns the undo function."""
        self._watching.add(watcher)  # first, so that a garbage collection cannot remove the interception
        if self._put is None:
            original = _in_use(getattr(self._owner, self._name))
            self._put = self._make(original), original
            setattr(self._owner, self._name, self._put[0])
        mine = weakref.ref(watcher)
        return lambda: self.unwatch(mine())

    def unwatch(self, watcher: Watcher | None = None) -> None:
        """Remove a watcher, or those garbage-collected; with the last one, torch gets its own function back."""
        if watcher is not None:
            self._watching.discard(watcher)
        if self._put is None or list(self._watching):  # not `len`, which counts watchers that are being collected
            return
        (ours, original), self._put = self._put, None
        _retired[ours] = original
        if getattr(self._owner, self._name) is ours:
            setattr(self._owner, self._name, _in_use(original))

    def _make(self, original: Function) -> Function:
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            watching = list(self._watching) if intercepted not in _retired else []
            if watching and getattr(self._handed, "over", None) != current_backward():
                return self._through(hand_over, watching, *args, **kwargs)
            return original(*args, **kwargs)

        def hand_over(*args: Any, **kwargs: Any) -> Any:
            """torch asks modes and subclasses first, which then call the same name again: that is still the same call."""
            before = getattr(self._handed, "over", None)
            self._handed.over = current_backward()
            try:
                return original(*args, **kwargs)
            finally:
                self._handed.over = before

        return intercepted


def _in_use(function: Function) -> Function:
    """The first function that is not a retired one of ours."""
    while function in _retired:
        function = _retired[function]
    return function
