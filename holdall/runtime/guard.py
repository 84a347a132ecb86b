"""Nobody reads a parameter whose update is still under way.

The guard looks at ops of the loop, not at those of forward and backward: these would become slow. The engine knows where its
forwards begin and end; of backwards it hears by `watch_calls`.

Most reads are ops of the dispatcher. A few are not: printing turns all dispatch modes off, and `tolist`, `numpy`, `data_ptr`
and pickling read the memory itself. These are methods of tensors, so a second mode sees them, one of torch functions (`Reads`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter

from holdall.optim._interception import Interception, current_backward
from holdall.runtime.gradients import Gradient
from holdall.runtime.ledger import Ledger


_READS = frozenset(  # methods that read memory behind the dispatcher's back
    getattr(torch.Tensor, name)
    for name in (
        *("__repr__", "__format__", "tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
        *("data_ptr", "untyped_storage", "_typed_storage", "storage", "share_memory_"),
    )
    if hasattr(torch.Tensor, name)
)


class Reads(TorchFunctionMode):
    """Sees the methods that read a tensor's memory without an op."""

    def __init__(self, touched: Callable[[int], None]) -> None:
        super().__init__()
        self._touched = touched
        self.is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_on and func in _READS and isinstance(args[0], torch.Tensor) and not isinstance(args[0], Gradient):
            self._touched(_key(args[0]))
        return func(*args, **(kwargs or {}))


def _key(t: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # `Reads` would see it
        return int(t.untyped_storage()._cdata)


class Guard(TorchDispatchMode):
    """On while the loop is by itself and updates are under way: an op that touches a home waits for its update."""

    supports_higher_order_operators = True

    def __init__(self, touched: Callable[[int], None]) -> None:
        super().__init__()
        self._touched = touched  # told the key of every storage that an op is about to use
        self._is_up = False
        self._is_on = False
        self._reads = Reads(touched)
        self._reads_are_up = False

    def can_rise(self) -> bool:
        """Not inside of somebody else's mode: whoever left that would take this one from the stack in its place.

        A `DeviceContext` is always at the bottom of its stack and finds itself there.
        """
        top, methods = _get_current_dispatch_mode(), _get_current_function_mode()
        can_see_ops = self._is_up or top is None or isinstance(top, (Guard, Ledger))
        return can_see_ops and (self._reads_are_up or methods is None or isinstance(methods, (Reads, DeviceContext)))

    def rise(self) -> None:
        self._is_on = self._reads.is_on = True
        if not self._is_up:
            self._is_up = True
            self.__enter__()
        if not self._reads_are_up:
            self._reads_are_up = True
            self._reads.__enter__()

    def lower(self) -> None:
        """Off; taken from the stacks as soon as nothing lies above it there."""
        self._is_on = self._reads.is_on = False
        if self._is_up and _get_current_dispatch_mode() is self:
            self._is_up = False
            self.__exit__(None, None, None)
        if self._reads_are_up and _get_current_function_mode() is self._reads:
            self._reads_are_up = False
            self._reads.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_on:
            for t in tree_iter((args, kwargs)):
                if isinstance(t, torch.Tensor) and not isinstance(t, Gradient):
                    self._touched(_key(t))
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
