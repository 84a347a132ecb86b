"""CAME: Adafactor's factored moment with a momentum, damped where fresh updates disagree with it.

Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", ACL 2023, arXiv 2307.02047, as in the authors'
code: beta2 is constant and nothing is corrected for the start at zero, so the first step of a matrix is some (1 - b1) / (b1
sqrt(1 - b3)), 11 times, `lr`: warm up. Vectors have the momentum and no damping.

State of an n x m matrix: nm + 2(n + m) numbers. Temporaries: one tensor of the parameter's size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from holdall.errors import InvalidInput
from holdall.optim._math.factored import average_factors, divide_by_root, factored_elements, is_factored, make_factors
from holdall.optim._math.per_parameter import Group, PerParameter, State, clip_rms_, compute_dtype


class CAME(PerParameter):
    name: ClassVar[str] = "came"
    paper: ClassVar[str] = "Luo et al. 2023, arXiv 2307.02047"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-4,
        *,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        **unknown: Any,
    ) -> None:
        """`betas`: of the momentum, of the squared gradient, of the disagreement. `lr`: 0.5 to 0.9 of what AdamW gets."""
        options = {"lr": lr, "betas": betas, "eps": eps, "clip_threshold": clip_threshold, "weight_decay": weight_decay}
        super().__init__(params, options, unknown)

    def _check(self, group: Group) -> None:
        if len(group["betas"]) != 3:
            raise InvalidInput(f"came has three betas, but got {group['betas']}", hint="usual: (0.9, 0.999, 0.9999)")

    def _bytes(self, p: torch.Tensor, group: Group) -> int:  # noqa: ARG002
        elements = p.numel() + factored_elements(p.shape) * (2 if is_factored(p.shape) else 1)
        return compute_dtype(p).itemsize * elements

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        beta1, beta2, beta3 = group["betas"]
        if "exp_avg" not in state:
            _make(grad, state)
        momentum: torch.Tensor = state["exp_avg"]
        update = _normalised(grad, state, beta2, group["eps"][0])
        clip_rms_(update, group["clip_threshold"])
        momentum.mul_(beta1).add_(update, alpha=1 - beta1)
        if is_factored(grad.shape):
            disagreement = update.sub_(momentum).square_().add_(group["eps"][1])
            average_factors(state["exp_avg_res_row"], state["exp_avg_res_col"], disagreement, beta3)
            del update, disagreement
            update = divide_by_root(momentum, state["exp_avg_res_row"], state["exp_avg_res_col"])
        else:
            update.copy_(momentum)
        lr = float(group["lr"])
        if group["weight_decay"]:
            value.add_(value, alpha=-group["weight_decay"] * lr)
        value.sub_(update.mul_(lr))


def _make(grad: torch.Tensor, state: State) -> None:
    state["exp_avg"] = torch.zeros_like(grad)
    if is_factored(grad.shape):
        state["exp_avg_sq_row"], state["exp_avg_sq_col"] = make_factors(grad)
        state["exp_avg_res_row"], state["exp_avg_res_col"] = make_factors(grad)
    else:
        state["exp_avg_sq"] = torch.zeros_like(grad)


def _normalised(grad: torch.Tensor, state: State, beta2: float, eps: float) -> torch.Tensor:
    """The gradient over the root of its second moment."""
    square = grad.square().add_(eps)
    if is_factored(grad.shape):
        average_factors(state["exp_avg_sq_row"], state["exp_avg_sq_col"], square, beta2)
        del square
        return divide_by_root(grad, state["exp_avg_sq_row"], state["exp_avg_sq_col"])
    state["exp_avg_sq"].mul_(beta2).add_(square, alpha=1 - beta2)
    return torch.rsqrt(state["exp_avg_sq"], out=square).mul_(grad)
