"""AdaLomo: Adafactor's rule during backward; a factored second moment and an update normalised per parameter.

Lv et al., "AdaLomo: Low-memory Optimization with Adaptive Learning Rate", Findings of ACL 2024, arXiv 2310.10195.
The rule is Adafactor's without momentum, with `lr` in the place of its relative step, so both share their kernels.
Each update is bounded by its own root mean square: clipping by a global norm, and the second pass it costs, is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from holdall.optim._in_backward.consuming import ConsumingOptimizer
from holdall.optim._math.factored import factored_direction, factored_elements
from holdall.optim._math.per_parameter import Group, State, clip_rms_, compute_dtype, rms


class AdaLomo(ConsumingOptimizer):
    """`eps`: added to squared gradients, and the least root mean square that a parameter counts as having.

    `clip_threshold`: of the update's root mean square. `decay_rate`: the moment's beta is 1 - step^-decay_rate.
    `loss_scale`, `process_group`, `accumulate` and the other clippings are as for `Lomo`; the paper's code scales the loss
    by 2^10.
    """

    name: ClassVar[str] = "adalomo"
    paper: ClassVar[str] = "Lv et al. 2024, arXiv 2310.10195"
    exact: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = 0.8,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        clip_param_norm: float | None = None,
        loss_scale: float | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        clip: str | None = None,
        accumulate: int = 1,
        **unknown: Any,
    ) -> None:
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
        }
        super().__init__(
            params,
            options,
            unknown,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            clip_param_norm=clip_param_norm,
            loss_scale=loss_scale,
            process_group=process_group,
            clip=clip,
            accumulate=accumulate,
        )

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        state["step"] = step = state.get("step", 0) + 1
        least_square, least_rms = group["eps"]
        beta = 1.0 - step ** -group["decay_rate"]
        update = clip_rms_(factored_direction(grad, state, beta=beta, eps=least_square), group["clip_threshold"])
        size = rms(value).clamp_(min=least_rms).mul_(group["lr"])
        if group["weight_decay"]:
            value.mul_(1 - size * group["weight_decay"])
        value.sub_(update.mul_(size))

    def _bytes(self, p: torch.Tensor, group: Group) -> int:  # noqa: ARG002
        return factored_elements(p.shape) * compute_dtype(p).itemsize
