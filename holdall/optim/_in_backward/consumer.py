"""Gradients consumed one by one in torch's post-accumulate hooks.

`Consumer` hands each gradient to its owner, which updates the parameter and frees the gradient. It raises an error where that
cannot work: at a second gradient for an updated parameter (an extra backward; a weight shared by two reentrant checkpoints)
and at reads of `.grad` after backward (clipping, loggers, a GradScaler). Gradients that must be held, for a norm or until the
last of several backwards, stay in `.grad`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from holdall.errors import InvalidInput, Unsupported
from holdall.optim._in_backward.clipping import check_ways, in_first_pass, norm_of, total_norm, unwatch_backward, watch_backward
from holdall.optim._math.rng import rewound
from holdall.updates.interception import current_backward

_READ_HINT = (
    "clip with `in_backward(optimizer, max_norm=...)` or the optimizer's own `clip_*` options, which say the norm too; "
    "log what else you need in a hook of your own"
)
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Spent(torch.Tensor):
    """The placeholder in `.grad` after the update: it has a shape and no memory, and computing with it raises an error."""

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


def second_gradient(first_task: int) -> Unsupported:
    """The error for a second gradient in one step. A backward inside another has the higher number of the two."""
    if _inside_checkpoint() or current_backward() <= first_task:
        return Unsupported(
            "a weight shared by several reentrant checkpoints got one gradient from each, and the first already updated it",
            hint='checkpoint with `use_reentrant=False`, or hold gradients (`max_norm=`, clip="hold"); if the weights were '
            "updated, begin again from saved ones",
        )
    return _too_many()


def _too_many() -> Unsupported:
    return Unsupported(
        "a second backward ran before `step()`, but the gradients of the first were already applied and freed",
        hint="call `step()` after each backward, give `accumulate=` the number of backwards per step, or make the batch one",
    )


def _inside_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class GradientOwner(Protocol):
    """The optimizer that applies the gradients."""

    @property
    def needs_norm(self) -> bool:
        """Must the norm of all gradients be known before the first update?"""
        ...

    @property
    def skips(self) -> bool:
        """Is this step skipped?"""
        ...

    def params(self) -> Iterator[Tensor]: ...

    def prepare(self, grad: Tensor) -> None:
        """Called once per gradient, before its norm is taken and before it is applied."""
        ...

    def found(self, norm: Tensor) -> None:
        """Called with the norm of this step's gradients."""
        ...

    def use(self, param: Tensor, grad: Tensor) -> None:
        """Update the parameter; the gradient may be overwritten."""
        ...


class Consumer:
    """Hooks on parameters that hand each gradient to the owner once per step. The hooks hold weak references only.

    `clip` and `accumulate` are as in `in_backward`. `wide`: norms in at least 32 bits.
    """

    def __init__(self, owner: GradientOwner, *, clip: str | None = None, accumulate: int = 1, wide: bool = False) -> None:
        self._handles: list[RemovableHandle] = []
        check_ways(clip, accumulate)
        self._owner = weakref.ref(owner)
        self.clip, self._accumulate, self._wide = clip, accumulate, wide
        self._hooked: set[int] = set()
        self.fired: list[Tensor] = []  # in this step
        self.knows = False  # is the norm of this step known?
        self._was_asked = False  # the loop itself asked for the norm
        self._is_quiet = False  # inside `led`: the caller runs the backwards
        self._gathered: dict[int, Tensor] | None = None  # norms by parameter, during a norm pass
        self._made = 0  # backwards of this step that brought gradients
        self._reached = False  # this backward brought gradients
        if clip is not None or accumulate > 1:
            watch_backward(self)

    def watch(self, param: Tensor) -> None:
        """Consume this parameter's gradients from now on; those of a frozen parameter once it is unfrozen."""
        if not param.requires_grad or id(param) in self._hooked:
            return
        mine = weakref.ref(self)

        def hook(param: Tensor) -> None:
            consumer = mine()
            if consumer is not None:
                consumer._arrive(param)

        self._hooked.add(id(param))
        self._handles.append(param.register_post_accumulate_grad_hook(hook))

    # gradients

    def _arrive(self, param: Tensor) -> None:
        if param.grad is None or (
            self._gathered is None and in_first_pass()
        ):  # the norm pass of another optimizer; the second pass brings it again
            return
        _refuse_sparse(param.grad)
        self._reached = True
        if self._gathered is not None or not self._waits():
            self._take(param)

    def _waits(self) -> bool:
        """Are gradients held until a later backward, or until the end of this one?"""
        owner = self._owner()
        holds = self.clip == "hold" and owner is not None and owner.needs_norm
        return holds or self._made + 1 < self._accumulate

    def _take(self, param: Tensor, *, is_prepared: bool = False) -> None:
        """Apply and free the parameter's current gradient."""
        grad, owner = param.grad, self._owner()
        if grad is None or owner is None:
            return
        param.grad = None
        if owner.needs_norm and not self.knows and self._gathered is None:
            raise InvalidInput(
                "the norm of all gradients must be known before the first update",
                hint='give clip="hold" or clip="twice" and call `loss.backward()`; or use `step(closure)`',
            )
        with torch.no_grad():
            if not is_prepared:
                owner.prepare(grad)
            if self._gathered is not None:
                self._gathered[id(param)] = norm_of(grad, wide=self._wide)
            else:
                owner.use(param, grad)
        del grad
        param.grad = Spent(param)
        self.fired.append(param)

    def _settle(self) -> None:
        """Apply all gradients that are left: held ones, ones set by hand, and those of parameters frozen when hooks were
        added."""
        owner = self._owner()
        there = [p for p in self.params() if p.grad is not None and not isinstance(p.grad, Spent)]
        if owner is None or not there:
            return
        for param in there:
            _refuse_sparse(param.grad)
        is_prepared = owner.needs_norm and not self.knows and not self.fired
        if is_prepared:
            with torch.no_grad():
                for param in there:
                    assert param.grad is not None
                    owner.prepare(param.grad)
                self._conclude(there, [norm_of(p.grad, wide=self._wide) for p in there if p.grad is not None])
        for param in there:
            self._take(param, is_prepared=is_prepared)
            self.watch(param)

    # the norm

    @contextmanager
    def gathering(self, *, was_asked: bool = False) -> Iterator[None]:
        """Inside, backward updates nothing and records norms. `was_asked`: they are for the next backward."""
        if any(isinstance(p.grad, Spent) for p in self.fired):
            if not was_asked:
                raise _too_many()
            raise InvalidInput("a norm pass cannot begin: this step's backward already ran", hint="call `grad_norm` before it")
        if any(p.grad is not None for p in self.params()):
            raise InvalidInput(
                "a norm pass cannot begin: there are gradients already", hint='call `zero_grad()` first, or give clip="hold"'
            )
        self._gathered = {}
        quiet, self._is_quiet = self._is_quiet, True
        try:
            yield
            there = [p for p in self.params() if id(p) in self._gathered]
            if there:
                self._conclude(there, [self._gathered[id(p)] for p in there])
                self._was_asked = was_asked
        finally:
            self._gathered = None
            self._is_quiet = quiet
            self.clear()

    def _conclude(self, params: list[Tensor], norms: list[Tensor]) -> None:
        owner = self._owner()
        if owner is not None:
            with torch.no_grad():
                owner.found(total_norm(params, norms))
            self.knows = True

    # the loop's backwards

    def params(self) -> Iterator[Tensor]:
        owner = self._owner()
        return iter(()) if owner is None else owner.params()

    def begin(self) -> None:
        self._reached = False
        for param in self.params():
            self.watch(param)
        if not self._was_asked and not self._is_quiet and all(p.grad is None for p in self.params()):
            self._restart()  # the previous step was abandoned

    def wants_norm(self) -> bool:
        owner = self._owner()
        return self.clip == "twice" and not self._is_quiet and owner is not None and owner.needs_norm and not self.knows

    def end(self) -> None:
        if self._reached and self._gathered is None:
            self._made += 1
            if self._made >= self._accumulate:
                self._settle()

    @contextmanager
    def led(self) -> Iterator[None]:
        """Inside, every backward runs once, whatever `clip` says: the caller computes the norm in another way."""
        quiet, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = quiet

    def run(self, closure: Callable[[], Any]) -> Any:
        """Run a closure that calls backward: once, or twice with the same random numbers if the norm must be known first."""
        owner = self._owner()
        assert owner is not None
        with torch.enable_grad():
            if not owner.needs_norm or self.knows or self.clip == "hold":
                return closure()
            with rewound(p.device for p in self.params()), self.gathering():
                loss = closure()
            if not self.knows:
                raise nothing_came()
            with self.led():
                return loss if owner.skips else closure()

    # the end of a step

    def flush(self) -> bool:
        """End a step: apply the gradients that are left and set every `.grad` to None. Returns whether the norm was known."""
        self._settle()
        self.clear()
        knew = self.knows
        self._restart()
        return knew

    def clear(self) -> None:
        for param in self.fired:
            if isinstance(param.grad, Spent):
                param.grad = None
        self.fired = []

    def _restart(self) -> None:
        self.knows = self._was_asked = False
        self._made = 0

    def close(self) -> None:
        """Remove all hooks; held gradients stay in `.grad`."""
        self.clear()
        self._let_go()

    def _let_go(self) -> None:
        unwatch_backward(self)
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooked = [], set()

    def __del__(self) -> None:
        self._let_go()


def _refuse_sparse(grad: Tensor | None) -> None:
    if grad is not None and grad.is_sparse:
        raise Unsupported("updates in backward do not support sparse gradients", hint="make the embedding with `sparse=False`")


def nothing_came() -> InvalidInput:
    return InvalidInput("no parameter of this optimizer got a gradient", hint="give the optimizer the model's parameters")
