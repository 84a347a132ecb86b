"""Adafactor: the second moment as row and column means, no first moment, steps relative to the parameter's own size.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018, arXiv 1804.04235.
`variant="paper"` is the paper's final algorithm, computed in 32 bits whatever the parameter has; `lr` is its cap of the
relative step, 0.01 there. `variant="torch"` is `torch.optim.Adafactor` bit for bit: epsilon is applied to the quotient and
not to the factors, and the computation is in the parameter's precision.

State of an n x m matrix: n + m numbers and a counter. Temporaries: one tensor of the parameter's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.optim._adafactor import adafactor as torch_adafactor

from holdall.errors import InvalidInput, unknown_name
from holdall.optim._math.factored import factored_direction, factored_elements, is_factored, make_factors
from holdall.optim._math.per_parameter import Group, PerParameter, State, clip_rms_, compute_dtype, rms

_EPS1 = 1e-30  # the paper's
_COUNTER = 4  # bytes of `step`, a tensor as in torch
_VARIANTS = ("paper", "torch")


class Adafactor(PerParameter):
    name: ClassVar[str] = "adafactor"
    paper: ClassVar[str] = "Shazeer and Stern 2018, arXiv 1804.04235"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        variant: str = "paper",
        beta1: float | None = None,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        relative_step: bool = True,
        warmup_init: bool = False,
        weight_decay: float = 0.0,
        **unknown: Any,
    ) -> None:
        """`relative_step=False`: the relative step is `lr` itself and not min(lr, 1/sqrt(t)). `d`: threshold of the clipping.

        `beta1`: a momentum of the clipped update, which costs as much as the parameter. `warmup_init`: the relative step begins
        at 1e-6 t. These three belong to the paper's variant. An `eps[0]` of None is each variant's own.
        """
        options = {
            "lr": lr,
            "variant": variant,
            "beta1": beta1,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
            "weight_decay": weight_decay,
        }
        super().__init__(params, options, unknown)

    def _check(self, group: Group) -> None:
        if group["variant"] not in _VARIANTS:
            raise unknown_name("variant of adafactor", str(group["variant"]), _VARIANTS)
        own = [k for k, usual in (("beta1", None), ("relative_step", True), ("warmup_init", False)) if group[k] != usual]
        if group["variant"] == "torch" and own:
            raise InvalidInput(f"the torch variant of adafactor has no `{own[0]}`", hint='leave it out, or use variant="paper"')
        if group["beta1"] is not None and not 0 <= group["beta1"] < 1:
            raise InvalidInput(f"`beta1` is {group['beta1']}, but must be at least 0 and below 1", hint="usual: 0.9")

    def _bytes(self, p: torch.Tensor, group: Group) -> int:
        if group["variant"] == "torch":
            return p.element_size() * factored_elements(p.shape) + _COUNTER
        elements = factored_elements(p.shape) + (p.numel() if group["beta1"] else 0)
        return compute_dtype(p).itemsize * elements + _COUNTER

    def _apply(self, p: torch.Tensor, grad: torch.Tensor, group: Group) -> None:
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        if group["variant"] == "torch":
            _step_as_torch(p, grad, state, group)
        else:
            super()._apply(p, grad, group)

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        state["step"] += 1
        t = float(state["step"])
        eps1, eps2 = group["eps"]
        update = factored_direction(grad, state, beta=1 - t ** group["beta2_decay"], eps=_EPS1 if eps1 is None else eps1)
        clip_rms_(update, group["d"])
        if group["beta1"]:
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(value)
            state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
            update.copy_(state["exp_avg"])
        alpha = rms(value).clamp_(min=eps2) * relative_size(t, group)
        if group["weight_decay"]:
            value.mul_(1 - float(group["lr"]) * group["weight_decay"])
        value.sub_(update.mul_(alpha))


def relative_size(t: float, group: Group) -> float:
    """The paper's rho_t."""
    lr = float(group["lr"])
    if not group["relative_step"]:
        return lr
    return min(1e-6 * t if group["warmup_init"] else lr, 1 / math.sqrt(t))


def _step_as_torch(p: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
    """torch's own function over one parameter, with its state laid out as torch does."""
    whole = is_factored(grad.shape)
    if whole and "row_var" not in state:
        state["row_var"], state["col_var"] = make_factors(grad)
    elif not whole and "variance" not in state:
        state["variance"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    torch_adafactor(
        [p],
        [grad],
        [state.get("row_var")],
        [state.get("col_var")],
        [state.get("variance")],
        [state["step"]],
        foreach=False,
        d=group["d"],
        lr=group["lr"],
        beta2_decay=group["beta2_decay"],
        weight_decay=group["weight_decay"],
        eps1=group["eps"][0],
        eps2=group["eps"][1],
        maximize=False,
        has_complex=False,
    )
