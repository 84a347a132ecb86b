"""LOMO: stochastic gradient descent during backward, so that only a few gradients exist at any time.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", ACL 2024, arXiv 2306.09782.
Without clipping the parameters are those of `torch.optim.SGD`, bit for bit; weight decay is decoupled. There is no state.
Clipping by the global norm needs a second backward or held gradients; accumulation needs held gradients (see
`_in_backward/consuming.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from holdall.optim._in_backward.consuming import ConsumingOptimizer, pieces
from holdall.optim._math.per_parameter import Group, compute_dtype


class Lomo(ConsumingOptimizer):
    """`clip_grad_norm`: exact, costs a second pass. `clip_grad_value`, `clip_param_norm`: one pass, another rule.

    `clip`: how the norm for `clip_grad_norm` is computed. "twice": `loss.backward()` runs its backward twice; "hold": gradients
    are held until its end; None: the loop calls `grad_norm`, or `step` with a closure. `norm` is that of the last step.
    `accumulate`: backwards per step; their gradients are held until the last of them.
    `loss_scale`: a number, or "dynamic". fp16 parameters need one, and the norm pass: an overflow halfway cannot be undone.
    `process_group`: gradients are averaged over its ranks before they are used.
    Call `close()`, or use it as a context manager, to remove its hooks.
    """

    name: ClassVar[str] = "lomo"
    paper: ClassVar[str] = "Lv et al. 2024, arXiv 2306.09782"
    exact: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        clip_param_norm: float | None = None,
        loss_scale: float | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        clip: str | None = None,
        accumulate: int = 1,
        **unknown: Any,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "weight_decay": weight_decay},
            unknown,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            clip_param_norm=clip_param_norm,
            loss_scale=loss_scale,
            process_group=process_group,
            clip=clip,
            accumulate=accumulate,
        )

    def _apply(self, p: torch.Tensor, grad: torch.Tensor, group: Group) -> None:
        """Update a slice at a time, which bounds the fp32 temporaries."""
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        for value, g in pieces(p.detach(), grad):
            wide = value.to(compute_dtype(p))  # the values themselves where they are wide
            if decay:
                wide.mul_(1 - lr * decay)
            wide.add_(g.to(wide.dtype), alpha=-lr)
            if wide is not value:
                value.copy_(wide)

    def _bytes(self, p: torch.Tensor, group: Group) -> int:  # noqa: ARG002
        return 0
