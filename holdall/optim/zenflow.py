"""ZenFlow: the columns of a weight whose gradients are large are updated in every step, the others every few steps, late.

Lan et al., "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates", arXiv 2505.12242 (DeepSpeed).

    optimizer = ZenFlow(model.parameters(), lr=1e-4, topk=0.1, update_interval=4)

Not exact, and so by your choice of it only. For a matrix, after `warmup` ordinary steps:

- every `select_interval` steps the share `topk` of its columns with the largest sums of |gradient| is selected; what was held
  back for the others is applied first;
- selected columns follow AdamW in every step;
- gradients of the others are added up. After `update_interval` steps their mean is one AdamW update of those columns. It is
  computed in the background, and its result becomes the weights at the next such step: a gradient takes effect at most
  2 `update_interval` steps late. `overlap=False` applies it at once.

Vectors, and everything with `topk=1`, follow AdamW bit for bit. Each column counts its own updates, so that a column that
changes sides keeps its moments: the published code clears them, and takes the weights back from their 16-bit copies, which
loses bits.
`drain` applies everything that is held back: before an evaluation, or at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from holdall.errors import InvalidInput
from holdall.optim._math.moments import MOMENTS, adamw_, moment_bytes
from holdall.optim._math.per_parameter import Group, PerParameter, State, compute_dtype


class ZenFlow(PerParameter):
    """`topk`: share of a matrix's columns updated in every step. `overlap`: the updates of others take effect late."""

    name: ClassVar[str] = "zenflow"
    paper: ClassVar[str] = "Lan et al. 2025, arXiv 2505.12242"
    exact: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        topk: float = 0.1,
        update_interval: int = 4,
        select_interval: int = 100,
        warmup: int = 0,
        overlap: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **unknown: Any,
    ) -> None:
        options = {
            "lr": lr,
            "topk": topk,
            "update_interval": update_interval,
            "select_interval": select_interval,
            "warmup": warmup,
            "overlap": overlap,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self._running: list[Future[None]] = []  # updates in the background
        super().__init__(params, options, unknown)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_running", [])  # a copy has the groups and states only

    def state_dict(self) -> dict[str, Any]:
        self.wait()
        return super().state_dict()

    def wait(self) -> None:
        """Until no update is being computed in the background; those that are done take effect when they are due."""
        running, self._running[:] = list(self._running), []
        for update in running:
            update.result()

    @torch.no_grad()
    def drain(self) -> None:
        """Apply every gradient that is held back."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p) or {}
                if "held" in state:
                    value = p if p.dtype == compute_dtype(p) else p.to(compute_dtype(p))
                    self._settle(value, state, group)
                    if value is not p:
                        p.copy_(value)

    # -- the rule

    def _check(self, group: Group) -> None:
        if not 0 <= group["topk"] <= 1:
            raise InvalidInput(f"`topk` is {group['topk']}, but is a share of the columns", hint="a usual value is 0.1")
        for key in ("update_interval", "select_interval"):
            if not isinstance(group[key], int) or group[key] < 1:
                raise InvalidInput(f"`{key}` is {group[key]!r}, but must be a whole number above 0", hint="use 1 or more")
        if not isinstance(group["warmup"], int) or group["warmup"] < 0:
            raise InvalidInput(f"`warmup` is {group['warmup']!r}, but must be a number of steps", hint="use 0 or more")

    def _update(self, value: Tensor, grad: Tensor, state: State, group: Group) -> None:
        state["step"] = step = state.get("step", 0) + 1
        if not _is_split(value, group):
            for key in MOMENTS:
                state.setdefault(key, torch.zeros_like(value, memory_format=torch.contiguous_format))
            adamw_(value, grad, [state[key] for key in MOMENTS], step, group)
            return
        if "held" not in state:
            _begin(value, state)
        after = step - 1 - group["warmup"]
        if after >= 0 and after % group["select_interval"] == 0:
            self._settle(value, state, group)
            state["order"] = by_importance(grad)
            state["count"] = round(group["topk"] * value.shape[1])
        selected, others = _sides(state)
        self._columns(value, grad[:, selected], selected, state, group, 1)
        if len(others):
            state["held"][:, others] += grad[:, others]
            state["since"] += 1
        if state["since"] >= group["update_interval"]:
            self._boundary(value, others, state, group)

    def _boundary(self, value: Tensor, others: Tensor, state: State, group: Group) -> None:
        """The other columns' turn: what was computed since the last one becomes the weights, and the next begins."""
        self._take_late(value, others, state)
        mean, steps = state["held"][:, others] / state["since"], state["since"]
        state["held"].zero_()
        state["since"] = 0
        if not group["overlap"]:
            self._columns(value, mean, others, state, group, steps)
            return
        state["late"] = 1
        settings = {**group, "params": []}  # as they are now: a schedule may change them
        given = value[:, others].clone(), mean, others, state, settings, steps
        if isinstance(value, FakeTensor):  # a trace, which sees one thread
            self._behind(*given)
        else:
            self._running.append(_pool().submit(self._behind, *given))

    @torch.no_grad()
    def _behind(self, base: Tensor, mean: Tensor, others: Tensor, state: State, group: Group, steps: int) -> None:
        """In the background: the new weights of the other columns."""
        state["new"][:, others] = self._moved(base, mean, others, state, group, steps)

    def _take_late(self, value: Tensor, others: Tensor, state: State) -> None:
        if state["late"]:
            self.wait()
            value[:, others] = state["new"][:, others]
            state["late"] = 0

    def _settle(self, value: Tensor, state: State, group: Group) -> None:
        """Apply what was computed, and what is held back."""
        _, others = _sides(state)
        self._take_late(value, others, state)
        if state["since"]:
            mean, steps = state["held"][:, others] / state["since"], state["since"]
            state["held"].zero_()
            state["since"] = 0
            self._columns(value, mean, others, state, group, steps)

    def _columns(self, value: Tensor, grad: Tensor, which: Tensor, state: State, group: Group, steps: int) -> None:
        value[:, which] = self._moved(value[:, which], grad, which, state, group, steps)

    def _moved(self, value: Tensor, grad: Tensor, which: Tensor, state: State, group: Group, steps: int) -> Tensor:
        """AdamW's new values of these columns, whose gradient is the mean over some steps; no other column is touched."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        moment = state["exp_avg"][:, which].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"][:, which].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["exp_avg"][:, which], state["exp_avg_sq"][:, which] = moment, square
        counts = state["counts"][which] + 1
        state["counts"][which] = counts
        first, second = (1 - beta1**counts).to(value.dtype), (1 - beta2**counts).sqrt().to(value.dtype)
        root = (square.sqrt() / second).add_(group["eps"])
        return value.mul((1 - lr * group["weight_decay"]) ** steps).sub_(lr / first * moment / root)

    def _bytes(self, p: Tensor, group: Group) -> int:
        size = compute_dtype(p).itemsize
        if not _is_split(p, group):
            return 2 * moment_bytes(p.numel(), 32, size)
        return 4 * p.numel() * size + p.shape[1] * (8 + 8)


def by_importance(grad: Tensor) -> Tensor:
    """The columns, those with the largest sums of absolute values first."""
    return grad.abs().sum(0).argsort(descending=True, stable=True)


def _sides(state: State) -> tuple[Tensor, Tensor]:
    """The selected columns, and the others."""
    return state["order"][: state["count"]], state["order"][state["count"] :]


def _is_split(p: Tensor, group: Group) -> bool:
    return p.dim() == 2 and group["topk"] < 1


def _begin(value: Tensor, state: State) -> None:
    """All columns are selected until the first selection."""
    for key in ("exp_avg", "exp_avg_sq", "held", "new"):
        state[key] = torch.zeros_like(value, memory_format=torch.contiguous_format)
    columns = value.shape[1]
    state["counts"] = torch.zeros(columns, dtype=torch.float64, device=value.device)
    state["order"] = torch.arange(columns, device=value.device)
    state["count"], state["since"], state["late"] = columns, 0, 0


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="holdall-zenflow")
