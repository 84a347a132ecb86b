"""The base of optimizers that use gradients up in backward: clipping, loss scaling and the end of a step.

The loop stays `loss.backward(); opt.step(); opt.zero_grad()`. Backward updates; `step()` ends the step: it takes gradients
that no hook saw and makes way for the next backward. Clipping by the global norm is exact and costs a second pass, because the
norm is known only when every gradient is gone: either `opt.step(closure)` (the closure, which calls backward, is run twice with
the same random numbers: one more forward and backward), or `opt.grad_norm(loss, retain_graph=True)` before `loss.backward()`
(one more backward; activations live through both). A forward that counts (BatchNorm's running statistics) counts twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from holdall.errors import InvalidInput, Unsupported
from holdall.optim._in_backward import Consumer
from holdall.optim._per_parameter import Group, PerParameter
from holdall.optim._rng import rewound

PIECE = 1 << 20  # elements widened at a time: bounds what fp32 arithmetic on narrow parameters takes
_SCALE = {
    "scale": 2.0**32,
    "clean_steps": 0,
}  # dynamic loss scale as LOMO's: halved on overflow, doubled after so many clean steps
_log = logging.getLogger("holdall")
_WINDOW, _FACTOR, _LEAST = 1000, 2.0, 1.0


class ConsumingOptimizer(PerParameter):
    """Subclasses write the rule as for `PerParameter`."""

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
    ) -> None:
        limits = {"clip_grad_norm": clip_grad_norm, "clip_grad_value": clip_grad_value, "clip_param_norm": clip_param_norm}
        given = [name for name, limit in limits.items() if limit is not None]
        if len(given) > 1:
            raise InvalidInput(f"gradients are clipped one way: {' and '.join(given)} were given", hint=f"keep `{given[0]}`")
        if any(limit is not None and not limit > 0 for limit in limits.values()):
            raise InvalidInput(f"`{given[0]}` is {limits[given[0]]}, not above 0", hint="leave it out to not clip")
        if isinstance(loss_scale, str) and loss_scale != "dynamic":
            raise InvalidInput(f"`loss_scale` is {loss_scale!r}", hint='give a number, or "dynamic"')
        self._limits = limits
        self._dynamic = loss_scale == "dynamic"
        self._overflows = self._dynamic  # gradients may be infinite, which must be known before the first parameter changes
        self._process_group = process_group
        if process_group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            _log.warning("%s without `process_group` updates each rank by itself, also inside DDP", type(self).__name__)
        self._consumer = Consumer(self._use)
        self._group_number: dict[int, int] = {}
        self._gathered: dict[int, Tensor] | None = None  # norms by parameter, while a norm pass is under way
        self._norm: Tensor | None = None  # of the norm pass before this step
        self._skips = False  # that pass overflowed
        scale = dict(_SCALE) if self._dynamic else {"scale": float(loss_scale), "clean_steps": 0} if loss_scale else {}
        super().__init__(params, {**options, **scale}, unknown)

    def __getstate__(self) -> dict[str, Any]:
        hint = "make another over the copied model's parameters, and use `state_dict` and `load_state_dict`"
        raise Unsupported(f"{type(self).__name__} cannot be copied: it lives in hooks of its parameters", hint=hint)

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
                "fp16 parameters need their loss scaled",
                hint='give `loss_scale="dynamic"` and call `opt.scale(loss)`, or use bf16',
            )

    # -- what the loop calls

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; the update divides by it."""
        scale: float = self.param_groups[0].get("scale", 1.0)
        return loss * scale

    def grad_norm(self, loss: Tensor, *, retain_graph: bool = False) -> Tensor:
        """A backward that updates nothing: the global norm of the (unscaled) gradients, by which the next backward clips.

        Costs one backward, and one more forward unless the graph is retained for the second; gradients are freed one by one.
        """
        with self._norm_pass():
            loss.backward(retain_graph=retain_graph)
        assert self._norm is not None
        return self._norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step. With a closure (which calls backward): run it, twice if the norm must be known first."""
        loss = None
        if closure is not None:
            if self._needs_norm and self._norm is None:
                with torch.enable_grad(), rewound(p.device for p in self._params()), self._norm_pass():
                    loss = closure()
            if not self._skips:
                with torch.enable_grad():
                    loss = closure()
        elif self._needs_norm and self._norm is None and not self._consumer.fired:
            self._norm_of_what_is_there()
        self._consumer.flush(self._params())
        self._end()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Gradients are None: there is nothing that could be set to zero."""
        self._consumer.clear()
        for param in self._params():
            param.grad = None

    def close(self) -> None:
        """Remove the hooks; from then on backward leaves gradients as without this optimizer."""
        self._consumer.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    @property
    def _needs_norm(self) -> bool:
        return self._limits["clip_grad_norm"] is not None or self._overflows

    def _params(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    @contextmanager
    def _norm_pass(self) -> Iterator[None]:
        if self._consumer.fired:
            raise InvalidInput("a norm pass cannot begin: this step's backward already ran", hint="call `grad_norm` before it")
        self._gathered = {}
        try:
            yield
            self._conclude(self._gathered)
        finally:
            self._gathered = None
            self._consumer.clear()

    def _norm_of_what_is_there(self) -> None:
        """Gradients that were set by hand are all there at once."""
        there = [p for p in self._params() if p.grad is not None]
        if there:
            self._conclude({id(p): _norm(p.grad) for p in there if p.grad is not None})

    def _conclude(self, norms: dict[int, Tensor]) -> None:
        """The global norm from the parts, in the order of the parameters, as `clip_grad_norm_` has it."""
        parts = [norms[id(p)] for p in self._params() if id(p) in norms]
        if not parts:
            raise InvalidInput(
                "no parameter of this optimizer got a gradient", hint="give the optimizer the model's parameters"
            )
        home = parts[0].device
        total = torch.linalg.vector_norm(torch.stack([part.to(home) for part in parts]))
        self._norm = total / self.param_groups[0].get("scale", 1.0)
        self._skips = self._overflows and not math.isfinite(float(self._norm))

    def _use(self, param: Tensor, grad: Tensor) -> None:
        """What a gradient is for: its norm in a norm pass, else the update."""
        if self._process_group is not None:
            dist.all_reduce(grad, group=self._process_group)
            grad.div_(dist.get_world_size(self._process_group))
        if self._gathered is not None:
            self._gathered[id(param)] = _norm(grad)
            return
        if self._needs_norm and self._norm is None:
            raise InvalidInput(
                f"{type(self).__name__} must know the norm of all gradients before the first update",
                hint="use `opt.step(closure)`, or `opt.grad_norm(loss, retain_graph=True)` before `loss.backward()`",
            )
        if not self._skips:
            group = self.param_groups[self._group_number[id(param)]]
            self._clip(grad, group.get("scale", 1.0))
            self._apply(param, grad, group)

    def _clip(self, grad: Tensor, scale: float) -> None:
        if scale != 1.0:
            grad.div_(scale)
        if (limit := self._limits["clip_grad_norm"]) is not None:
            assert self._norm is not None
            grad.mul_(_coefficient(limit, self._norm).to(grad.device))
        elif (limit := self._limits["clip_grad_value"]) is not None:
            grad.clamp_(-limit, limit)
        elif (limit := self._limits["clip_param_norm"]) is not None:
            grad.mul_(_coefficient(limit, _norm(grad)))

    def _end(self) -> None:
        if self._dynamic and self._norm is not None:
            for group in self.param_groups:
                _adjust_scale(group, overflowed=self._skips)
        self._norm, self._skips = None, False


def _norm(grad: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return norm


def _coefficient(limit: float, norm: Tensor) -> Tensor:
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def _adjust_scale(group: Group, *, overflowed: bool) -> None:
    if overflowed:
        group["scale"], group["clean_steps"] = max(group["scale"] / _FACTOR, _LEAST), 0
        return
    group["clean_steps"] += 1
    if group["clean_steps"] == _WINDOW:
        group["scale"], group["clean_steps"] = group["scale"] * _FACTOR, 0


def pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Stretches of tensors of one shape, small enough to widen; the whole where they are not laid out alike."""
    if tensors[0].numel() <= PIECE or not all(t.is_contiguous() for t in tensors):
        return [tensors]
    flat = [t.view(-1) for t in tensors]
    return (tuple(f[begin : begin + PIECE] for f in flat) for begin in range(0, flat[0].numel(), PIECE))
