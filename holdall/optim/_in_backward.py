"""Update in backward: a parameter is updated the moment its gradient is complete, and the gradient is freed at once.

`Consumer` calls a function with (parameter, gradient) from torch's post-accumulate hooks and keeps watch over what such a step
cannot give: a second gradient for a parameter (accumulation; a weight shared by two reentrant checkpoints) and anyone who reads
`.grad` after backward (clipping, loggers, a GradScaler) are refused in one line. `BackwardOptimizer` is the base of the
optimizers that live this way; `in_backward` lets any `torch.optim` class whose rule treats each parameter by itself do so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from holdall.errors import InvalidInput, Unsupported
from holdall.optim._part import Part, is_separable, snapshot

_READ_HINT = "clip with the optimizer's own `clip_*` options, and log what you need in a hook of your own"
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Spent(torch.Tensor):
    """What `.grad` is after the update: it has a shape and no bytes, and whoever computes with it is told why he cannot."""

    task: int  # the backward that made the gradient

    @staticmethod
    def __new__(cls, like: Tensor) -> Spent:
        made: Spent = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, like: Tensor) -> None:  # noqa: ARG002
        self.task = current_backward()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Spent({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if func in _ALIASES and isinstance(first, Spent):
            return first
        if isinstance(first, Spent) and current_backward() >= 0:
            raise second_gradient(first.task)
        raise Unsupported("this gradient is gone: its parameter was updated with it during backward", hint=_READ_HINT)


def current_backward() -> int:
    """The number of the backward that is running on this thread; -1: none."""
    return int(torch._C._current_graph_task_id())


def second_gradient(first_task: int) -> Unsupported:
    """Why a parameter gets another gradient in the same step. A backward inside a backward has a later number than its host."""
    if _inside_checkpoint() or current_backward() <= first_task:
        return Unsupported(
            "a weight shared by several reentrant checkpoints got one gradient from each, and the first already updated it",
            hint="checkpoint with `use_reentrant=False`, and begin again from saved weights",
        )
    return Unsupported(
        "a second backward came before `step()`: gradients cannot be accumulated, the first is already used up",
        hint="call `step()` after each backward, make the batch one backward, or use an optimizer that keeps gradients",
    )


def _inside_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Consumer:
    """Hooks on parameters that hand each gradient to `use` once per step. Nobody is kept alive by the hooks."""

    def __init__(self, use: Callable[[Tensor, Tensor], None]) -> None:
        self._use = weakref.WeakMethod(use)
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        self.fired: list[Tensor] = []  # in this step

    def watch(self, param: Tensor) -> None:
        """Take this parameter's gradients from now on; frozen ones are taken when they are no longer frozen (`flush`)."""
        if not param.requires_grad or id(param) in self._hooked:
            return
        mine = weakref.ref(self)

        def hook(param: Tensor) -> None:
            consumer = mine()
            if consumer is not None:
                consumer.take(param)

        self._hooked.add(id(param))
        self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def take(self, param: Tensor) -> None:
        """Use up the gradient that the parameter has now."""
        grad, use = param.grad, self._use()
        if grad is None or use is None:
            return
        if grad.is_sparse:
            raise Unsupported("sparse gradients cannot be used up in backward", hint="make the embedding with `sparse=False`")
        param.grad = None
        with torch.no_grad():
            use(param, grad)
        del grad
        param.grad = Spent(param)
        self.fired.append(param)

    def flush(self, params: Iterator[Tensor]) -> None:
        """End a step: take what no hook saw (set by hand, or unfrozen since), and let every `.grad` be None."""
        for param in params:
            if param.grad is not None and not isinstance(param.grad, Spent):
                self.take(param)
                self.watch(param)
        self.clear()

    def clear(self) -> None:
        for param in self.fired:
            if isinstance(param.grad, Spent):
                param.grad = None
        self.fired = []

    def close(self) -> None:
        """Remove every hook."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooked = [], set()

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()


class InBackward:
    """Any separable `torch.optim` class, stepped per parameter in backward. Made by `in_backward`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not is_separable(optimizer):
            raise Unsupported(
                f"{type(optimizer).__name__} looks at all parameters at once",
                hint="use one that treats each parameter by itself",
            )
        if getattr(optimizer, "consumes_gradients", False):
            raise InvalidInput(f"{type(optimizer).__name__} updates in backward by itself", hint="use it as it is")
        self.optimizer = optimizer
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._place = {id(p): n for n, p in enumerate(self._params)}
        self._part = Part(optimizer, self._params)
        self._consumer = Consumer(self._update)
        self._ended = optimizer.register_step_pre_hook(self._end)
        for param in self._params:
            self._consumer.watch(param)

    def _update(self, param: Tensor, grad: Tensor) -> None:
        state: dict[str, Any] = dict(self.optimizer.state.get(param, {}))
        self._part.step([param], [grad], [state], snapshot(self.optimizer), [self._place[id(param)]])
        self.optimizer.state[param].update(state)

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if any(callable(a) for a in args) or kwargs.get("closure") is not None:
            raise Unsupported("a closure cannot be given where updates happen in backward", hint="call backward, then `step()`")
        self._consumer.flush(iter(self._params))

    def close(self) -> None:
        self._consumer.close()
        self._ended.remove()


@contextmanager
def in_backward(optimizer: torch.optim.Optimizer) -> Iterator[InBackward]:
    """Inside, each parameter is updated in backward; `step()` and `zero_grad()` of the loop stay, and only end the step.

    The bits are those of the same class without its foreach or fused form. No accumulation, no clipping by the global norm.
    """
    made = InBackward(optimizer)
    try:
        yield made
    finally:
        made.close()
