"""Updates in backward: a parameter is updated as soon as its gradient is complete, and the gradient is freed at once.

For any `torch.optim` class that updates each parameter on its own. `consuming.py` is the base of optimizers that always update
this way, `consumer.py` the part that both share, `clipping.py` the norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from holdall.errors import InvalidInput, Unsupported
from holdall.optim._in_backward.clipping import coefficient
from holdall.optim._in_backward.consumer import Consumer
from holdall.updates.parts import Part, is_separable, snapshot


class BackwardUpdates:
    """A `torch.optim` optimizer stepped parameter by parameter in backward. Made by `in_backward`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, clip: str = "hold", accumulate: int = 1
    ) -> None:
        if not is_separable(optimizer):
            raise Unsupported(
                f"{type(optimizer).__name__} updates all parameters together, so it cannot update in backward",
                hint="use an optimizer that updates each parameter alone, such as torch.optim.AdamW",
            )
        if getattr(optimizer, "consumes_gradients", False):
            raise InvalidInput(
                f"{type(optimizer).__name__} updates in backward by itself",
                hint="call its `step()` as usual, without `in_backward`",
            )
        if max_norm is not None and not max_norm > 0:
            raise InvalidInput(f"`max_norm` is {max_norm}, not above 0", hint="leave it out to not clip")
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.norm: Tensor | None = None  # of the last step's gradients, before clipping
        self._factor: Tensor | None = None
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._place = {id(p): n for n, p in enumerate(self._params)}
        self._part = Part(optimizer, self._params)
        self._clip = clip if max_norm is not None else None
        self._consumer = Consumer(self, clip=self._clip, accumulate=accumulate)
        self._ended = optimizer.register_step_pre_hook(self._end)
        for param in self._params:
            self._consumer.watch(param)
        if hasattr(optimizer, "sketches_are_gradients"):  # CompAct's sketches: without this, the hooks do not see them
            optimizer.sketches_are_gradients = True

    @property
    def needs_norm(self) -> bool:
        return self.max_norm is not None

    @property
    def skips(self) -> bool:
        return False

    def params(self) -> Iterator[Tensor]:
        return iter(self._params)

    def prepare(self, grad: Tensor) -> None:
        """Does nothing: gradients are applied unchanged."""

    def found(self, norm: Tensor) -> None:
        assert self.max_norm is not None
        self.norm, self._factor = norm, coefficient(self.max_norm, norm)

    def use(self, param: Tensor, grad: Tensor) -> None:
        if self._factor is not None:
            grad.mul_(self._factor.to(grad.device))
        state: dict[str, Any] = dict(self.optimizer.state.get(param, {}))
        self._part.step([param], [grad], [state], snapshot(self.optimizer), [self._place[id(param)]])
        self.optimizer.state[param].update(state)

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure") or next((a for a in args if callable(a)), None)
        if closure is not None and self._clip != "twice":
            raise Unsupported("`step(closure)` cannot be used with updates in backward", hint="call backward, then `step()`")
        loss = None if closure is None else self._consumer.run(closure)
        self._consumer.flush()
        self._factor = None
        return (
            None if closure is None else ((optimizer, lambda: loss), {})
        )  # every gradient is None, so the optimizer's own step does nothing

    def close(self) -> None:
        self._consumer.close()
        self._ended.remove()
        vars(self.optimizer).pop("sketches_are_gradients", None)


@contextmanager
def in_backward(
    optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, clip: str = "hold", accumulate: int = 1
) -> Iterator[BackwardUpdates]:
    """Inside, each parameter is updated in backward; the loop's `step()` and `zero_grad()` stay and only end the step.

    The result is bitwise equal to the same class with `foreach=False, fused=False`.

    `max_norm`: gradients are first clipped as by `clip_grad_norm_` over the optimizer's parameters; `made.norm` is the norm.
    With `clip="hold"` that takes the bytes of all gradients until the end of backward. With `clip="twice"` it takes one more
    backward over a retained graph, or one more forward and backward with `optimizer.step(closure)`; the loop's own hooks run in
    both. `accumulate`: backwards per step; their gradients are held until the last of them. (`Flora` holds them as small
    sketches instead: see its `sketching`.)
    """
    made = BackwardUpdates(optimizer, max_norm=max_norm, clip=clip, accumulate=accumulate)
    try:
        yield made
    finally:
        made.close()
