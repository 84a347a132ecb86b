"""Makes the loop wait when it accesses a parameter whose update is still running.

The guard checks ops of the loop only: in forward and backward it would cost time. The engine knows where its forwards begin and
end; `watch_calls` reports backwards.

Most reads are dispatched ops. A few are not: printing turns off all dispatch modes, and `tolist`, `numpy`, `data_ptr` and
pickling read memory directly. These are tensor methods, so a torch-function mode (`Reads`) sees them. It is on whenever the
loop runs between a backward and the next forward, because it also detects writes that change no version counter: through
`p.data`, and replaced tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter

from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.states.gradients.offloaded import Gradient
from holdall.updates.interception import Interception, current_backward

_READS = frozenset(  # methods that read memory without the dispatcher
    getattr(torch.Tensor, name)
    for name in (
        *("__repr__", "__format__", "tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
        *("data_ptr", "untyped_storage", "_typed_storage", "storage", "share_memory_"),
    )
    if hasattr(torch.Tensor, name)
)


_LOOKS = frozenset(
    getattr(torch.Tensor, name) for name in ("__repr__", "__format__", "tolist", "__reduce_ex__", "__deepcopy__")
)
_ABOUT = frozenset({"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "requires_grad_", "__hash__"})
_GET, _SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GRAD = frozenset({torch.Tensor.grad.__get__, torch.Tensor.grad.__set__})  # type: ignore[union-attr]


class Owner(Protocol):
    """Knows the parameters that the guard protects."""

    def touched(self, key: int) -> None:
        """The storage of this key is about to be read or written."""
        ...

    def written(self, tensor: torch.Tensor) -> None:
        """A parameter, or a tensor that shares its memory, may have been written to."""
        ...

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Handle `parameter.data = value` by copying the value; False: let the assignment happen."""
        ...

    def master_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The master of a working copy; any other tensor is returned as it is."""
        ...


class Reads(TorchFunctionMode):
    """Detects methods that read or write a tensor's memory without an op."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner
        self.is_on = False
        self.is_guarding = False  # updates are running
        self.is_retired = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if not self.is_on or not isinstance(first, torch.Tensor):
            return func(*args, **(kwargs or {}))
        if isinstance(first, Gradient):
            return first.answer(func, args) if not kwargs else func(*args, **kwargs)
        if func in _GRAD:  # called twice per parameter and step
            return func(self._owner.master_of(first), *args[1:])
        if func in _READS:
            if self.is_guarding:
                self._owner.touched(_key(first))
            if func not in _LOOKS:
                self._owner.written(first)
        elif func == _GET:
            found = func(*args)
            self._owner.written(first)
            return found
        elif func == _SET:
            if self._owner.assign(first, args[1]):
                return None
        elif self.is_guarding and torch.is_grad_enabled() and getattr(func, "__name__", "") not in _ABOUT:
            for t in tree_iter((args, kwargs)):  # autograd reads versions before any op is dispatched
                if isinstance(t, torch.nn.Parameter):
                    self._owner.touched(_key(t))
        return func(*args, **(kwargs or {}))


def _key(t: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # hide it from `Reads`
        return int(t.untyped_storage()._cdata)


class Guard(TorchDispatchMode):
    """On while the loop runs and updates are running: an op on a master waits for its update."""

    supports_higher_order_operators = True

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._touched = owner.touched  # receives the key of every storage that an op will use
        self._is_up = False
        self._is_on = False
        self._reads = Reads(owner)
        self._reads_are_up = False

    def can_rise(self) -> bool:
        """Can the mode be entered? Not inside someone else's mode, whose exit would pop this one instead.

        A `DeviceContext` is always at the bottom of its stack and finds itself there.
        """
        top = _get_current_dispatch_mode()
        return (self._is_up or top is None or isinstance(top, (Guard, Ledger))) and self.can_watch()

    def can_watch(self) -> bool:
        methods = _get_current_function_mode()
        return self._reads_are_up or methods is None or isinstance(methods, (Reads, DeviceContext))

    def rise(self) -> None:
        """Updates are running: make accesses to their tensors wait."""
        self.watch()
        self._is_on = self._reads.is_guarding = True
        if not self._is_up:
            self._is_up = True
            self.__enter__()

    def watch(self) -> None:
        """The loop runs: detect accesses to parameters without an op."""
        self._reads.is_on = True
        if not self._reads_are_up:
            self._reads_are_up = True
            self._reads.__enter__()

    def calm(self) -> None:
        """No update is running any more. Leave the mode stack as soon as this mode is on top."""
        self._is_on = self._reads.is_guarding = False
        if self._is_up and _get_current_dispatch_mode() is self:
            self._is_up = False
            self.__exit__(None, None, None)

    def lower(self) -> None:
        """Turn both modes off: a forward or backward runs."""
        self.calm()
        self._reads.is_on = False
        if self._reads_are_up and _get_current_function_mode() is self._reads:
            self._reads_are_up = False
            self._reads.__exit__(None, None, None)
            while isinstance(below := _get_current_function_mode(), Reads) and below.is_retired:
                below.__exit__(None, None, None)

    def retire(self) -> None:
        """Turn both modes off for good. If another harness's mode lies above on its stack, this one leaves with it."""
        self.lower()
        self._reads.is_retired = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_on:
            for t in tree_iter((args, kwargs)):
                if isinstance(t, torch.Tensor) and not isinstance(t, Gradient):
                    self._touched(_key(t))
        return func(*args, **(kwargs or {}))


class Watcher(Protocol):
    def before_backward(self) -> None: ...

    def after_backward(self) -> None: ...

    def after_grad(self, inputs: Sequence[Any]) -> None:
        """After `torch.autograd.grad` for these tensors."""
        ...

    def work_of(self, tensor: Any) -> Any:
        """The working copy that currently replaces a parameter; any other tensor is returned as it is."""
        ...


def _backward(original: Callable[..., None], watching: list[Watcher], *args: Any, **kwargs: Any) -> None:
    if current_backward() >= 0:  # called inside a backward, not by the loop
        watching = []
    for watcher in watching:
        watcher.before_backward()
    try:
        original(*args, **kwargs)
    finally:
        for watcher in watching:
            watcher.after_backward()


def _grad(original: Callable[..., Any], watching: list[Watcher], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` for parameters whose working copies were used in the forward."""
    if current_backward() >= 0:
        return original(outputs, inputs, *args, **kwargs)
    asked = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    used = asked
    for watcher in watching:
        used = [watcher.work_of(t) for t in used]
        watcher.before_backward()
    try:
        found = original(outputs, used, *args, **kwargs)
    finally:
        for watcher in watching:
            watcher.after_grad(used)
    return tuple(
        g if g is None or u is t else g.to(device=t.device, dtype=t.dtype) for g, u, t in zip(found, used, asked, strict=True)
    )


_calls: Interception[Watcher] = Interception(torch.autograd, "backward", _backward)
_grads: Interception[Watcher] = Interception(torch.autograd, "grad", _grad)


def watch_calls(watcher: Watcher) -> Callable[[], None]:
    """Report every backward to the watcher, however the loop calls it; returns the undo function."""
    ends = _calls.watch(watcher), _grads.watch(watcher)

    def unwatch() -> None:
        for end in ends:
            end()

    return unwatch


def unwatch_calls() -> None:
    """Stop watching for watchers that were garbage-collected."""
    _calls.unwatch()
    _grads.unwatch()
