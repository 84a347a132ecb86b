"""The base of optimizers that update in backward: clipping, loss scaling and the end of a step.

The loop stays `loss.backward(); opt.step(); opt.zero_grad()`. Backward updates; `step()` ends the step: it applies gradients
that no hook saw and prepares the next backward. Clipping by the global norm is exact, so it needs all gradients first. With
`clip="hold"` they are held until the end of backward; with `clip="twice"` `loss.backward()` runs its backward twice (see
`clipping.py`). Without `clip` the loop calls `opt.step(closure)` (the closure, which calls backward, runs twice with the same
random numbers: one more forward and backward) or `opt.grad_norm(loss, retain_graph=True)` before `loss.backward()` (one more
backward; activations are kept for both). Side effects of a forward, such as BatchNorm's running statistics, then happen twice.
`accumulate`: backwards per step; their gradients are held until the last of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from holdall.errors import InvalidInput, Unsupported
from holdall.optim._in_backward.clipping import coefficient, norm_of
from holdall.optim._in_backward.consumer import Consumer, nothing_came
from holdall.optim._math.per_parameter import Group, PerParameter

PIECE = 1 << 20  # elements converted to fp32 at a time: bounds the temporaries of 16-bit parameters
_SCALE = {
    "scale": 2.0**32,
    "clean_steps": 0,
}  # dynamic loss scale as LOMO's: halved on overflow, doubled after so many clean steps
_log = logging.getLogger("holdall")
_WINDOW, _FACTOR, _LEAST = 1000, 2.0, 1.0


class ConsumingOptimizer(PerParameter):
    """Subclasses define the update rule as for `PerParameter`."""

    consumes_gradients: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        options: dict[str, Any],
        unknown: dict[str, Any],
        *,
        clip_grad_norm: float | None,
        clip_grad_value: float | None,
        clip_param_norm: float | None,
        loss_scale: float | str | None,
        process_group: dist.ProcessGroup | None,
        clip: str | None,
        accumulate: int,
    ) -> None:
        limits = {"clip_grad_norm": clip_grad_norm, "clip_grad_value": clip_grad_value, "clip_param_norm": clip_param_norm}
        given = [name for name, limit in limits.items() if limit is not None]
        if len(given) > 1:
            raise InvalidInput(
                f"only one kind of clipping can be used, but {' and '.join(given)} were given", hint=f"keep `{given[0]}`"
            )
        if any(limit is not None and not limit > 0 for limit in limits.values()):
            raise InvalidInput(f"`{given[0]}` is {limits[given[0]]}, not above 0", hint="leave it out to not clip")
        if isinstance(loss_scale, str) and loss_scale != "dynamic":
            raise InvalidInput(f"`loss_scale` is {loss_scale!r}", hint='give a number, or "dynamic"')
        self._limits = limits
        self._dynamic = loss_scale == "dynamic"
        self._overflows = self._dynamic  # gradients may overflow, which must be known before the first update
        self._process_group = process_group
        if process_group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            _log.warning("%s without `process_group` updates each rank by itself, also inside DDP", type(self).__name__)
        if accumulate > 1 and clip_grad_norm is not None and clip is None:
            raise InvalidInput(
                "clipping by the norm with `accumulate` needs the gradients of all backwards of a step",
                hint='give clip="hold" too',
            )
        self.accumulate = accumulate
        self._consumer = Consumer(self, clip=clip, accumulate=accumulate, wide=True)
        self._group_number: dict[int, int] = {}
        self.norm: Tensor | None = None  # of the last step's gradients before clipping; None: not computed
        self.skips = False  # gradients overflowed: this step updates nothing
        scale = dict(_SCALE) if self._dynamic else {"scale": float(loss_scale), "clean_steps": 0} if loss_scale else {}
        super().__init__(params, {**options, **scale}, unknown)

    def __getstate__(self) -> dict[str, Any]:
        hint = "make another over the copied model's parameters, and use `state_dict` and `load_state_dict`"
        raise Unsupported(f"{type(self).__name__} cannot be copied or pickled: it has hooks on its parameters", hint=hint)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            self._overflows |= param.dtype == torch.float16
            self._group_number[id(param)] = len(self.param_groups) - 1
            self._consumer.watch(param)

    def _check(self, group: Group) -> None:
        if "scale" not in group and any(p.dtype == torch.float16 for p in group["params"]):
            raise InvalidInput(
                "fp16 parameters need loss scaling",
                hint='give `loss_scale="dynamic"` and call `opt.scale(loss)`, or use bf16',
            )

    # -- called by the loop

    def scale(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the loss scale; the update divides by it."""
        scale: float = self.param_groups[0].get("scale", 1.0)
        return loss * scale

    def grad_norm(self, loss: Tensor, *, retain_graph: bool = False) -> Tensor:
        """Run a backward without updates; returns the global norm of the (unscaled) gradients, which clips the next backward.

        Costs one backward, and one forward unless the graph is retained; gradients are freed one by one.
        """
        with self._consumer.gathering(was_asked=True):
            loss.backward(retain_graph=retain_graph)
        if not self._consumer.knows or self.norm is None:
            raise nothing_came()
        return self.norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step. With a closure (which calls backward): run it, twice if the norm must be known first."""
        loss = None if closure is None else self._consumer.run(closure)
        found = self._consumer.flush()
        if self._dynamic and found:
            for group in self.param_groups:
                _adjust_scale(group, overflowed=self.skips)
        self.skips = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Does nothing: gradients are already None."""
        self._consumer.clear()
        for param in self.params():
            param.grad = None

    def close(self) -> None:
        """Remove the hooks; backward then leaves gradients in `.grad` as usual."""
        self._consumer.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def held_norm(self) -> float | None:
        """The maximal global norm for which gradients are held until the end of backward; None: they are not held."""
        return self._limits["clip_grad_norm"] if self._consumer.clip == "hold" else None

    # -- for the consumer

    @property
    def needs_norm(self) -> bool:
        return self._limits["clip_grad_norm"] is not None or self._overflows

    def params(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def prepare(self, grad: Tensor) -> None:
        if self._process_group is not None:
            dist.all_reduce(grad, group=self._process_group)
            grad.div_(dist.get_world_size(self._process_group))

    def found(self, norm: Tensor) -> None:
        self.norm = norm / self.param_groups[0].get("scale", 1.0)
        self.skips = self._overflows and not math.isfinite(float(self.norm))

    def use(self, param: Tensor, grad: Tensor) -> None:
        if not self.skips:
            group = self.param_groups[self._group_number[id(param)]]
            self._clip(grad, group.get("scale", 1.0))
            self._apply(param, grad, group)

    def _clip(self, grad: Tensor, scale: float) -> None:
        if scale != 1.0:
            grad.div_(scale)
        if (limit := self._limits["clip_grad_norm"]) is not None:
            assert self.norm is not None
            grad.mul_(coefficient(limit, self.norm).to(grad.device))
        elif (limit := self._limits["clip_grad_value"]) is not None:
            grad.clamp_(-limit, limit)
        elif (limit := self._limits["clip_param_norm"]) is not None:
            grad.mul_(coefficient(limit, norm_of(grad, wide=True)))


def _adjust_scale(group: Group, *, overflowed: bool) -> None:
    if overflowed:
        group["scale"], group["clean_steps"] = max(group["scale"] / _FACTOR, _LEAST), 0
        return
    group["clean_steps"] += 1
    if group["clean_steps"] == _WINDOW:
        group["scale"], group["clean_steps"] = group["scale"] * _FACTOR, 0


def pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Slices of tensors of one shape, small enough to convert; the whole tensors if their layouts differ."""
    if tensors[0].numel() <= PIECE or not all(t.is_contiguous() for t in tensors):
        return [tensors]
    flat = [t.view(-1) for t in tensors]
    return (tuple(f[begin : begin + PIECE] for f in flat) for begin in range(0, flat[0].numel(), PIECE))
