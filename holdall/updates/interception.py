"""A function of torch's that goes through one of ours while anybody watches, and is torch's own again with the last of them.

There are two such places, one for each way to a backward: `Tensor.backward` (`_clipping`: backwards of the loop) and
`torch.autograd.backward`, which the method calls (`runtime/switching/backward_hook.py`: all of them). This lies here since
optimizers work without the runtime.

Somebody else may have put a function in front of ours when the last watcher goes. Then ours cannot be taken away: it hands
calls on, and is passed over as soon as what stands in front of it is taken away by us or another watcher comes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Watcher = TypeVar("Watcher")
Function = Callable[..., Any]

_retired: weakref.WeakKeyDictionary[Function, Function] = weakref.WeakKeyDictionary()  # -> what it was put in front of


def current_backward() -> int:
    """The number of the backward that is running on this thread; -1: none."""
    return int(torch._C._current_graph_task_id())


class Interception(Generic[Watcher]):
    """Calls of `owner.name` become `through(original, watching, *args, **kwargs)`. Nobody is kept alive by watching."""

    def __init__(self, owner: Any, name: str, through: Function) -> None:
        self._owner, self._name, self._through = owner, name, through
        self._watching: weakref.WeakSet[Any] = weakref.WeakSet()
        self._put: tuple[Function, Function] | None = None  # ours, and what it was put in front of
        self._handed = threading.local()  # `.over`: the backward in which a call is torch's own business now

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """From here on the watcher hears of calls; returns what ends it."""
        self._watching.add(watcher)  # first: from here on nobody's collection takes away what is there
        if self._put is None:
            original = _in_use(getattr(self._owner, self._name))
            self._put = self._make(original), original
            setattr(self._owner, self._name, self._put[0])
        mine = weakref.ref(watcher)
        return lambda: self.unwatch(mine())

    def unwatch(self, watcher: Watcher | None = None) -> None:
        """One of them less, or those that were collected; with the last, torch has its own function again."""
        if watcher is not None:
            self._watching.discard(watcher)
        if self._put is None or list(self._watching):  # not `len`, which counts those that are just being collected
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
            """Torch asks modes and subclasses first, who then call by the same name again: that is still the same call."""
            before = getattr(self._handed, "over", None)
            self._handed.over = current_backward()
            try:
                return original(*args, **kwargs)
            finally:
                self._handed.over = before

        return intercepted


def _in_use(function: Function) -> Function:
    """The first that is not a retired one of ours."""
    while function in _retired:
        function = _retired[function]
    return function
