"""APOLLO: the gradient is scaled by channel, with the factors that Adam has on a random low-rank sketch of it.

Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", MLSys 2025, arXiv 2412.05270. Adam's moments live on the
sketch, of rank `rank`, of the matrix' shorter side; the sketch is drawn from a seed at every step and never stored, and from
the next seed of a chain every `update_proj_gap` steps. `scale_type="tensor"` with rank 1 and scale 128 is APOLLO-Mini. A
group without a rank is trained by AdamW.

State of an n x m matrix: 2 rank max(n, m) numbers and one norm. Temporaries: the scaled gradient, the projector, three
sketches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from holdall.errors import unknown_name
from holdall.optim._math.moments import MOMENTS, adam_direction, corrected, moment_bytes
from holdall.optim._math.per_parameter import Group, PerParameter, State, compute_dtype, number_seeds, seed_of
from holdall.optim._math.projection import check_matrices, down, gaussian, is_left, matrix_groups, next_seed, usual_rank

_GROWTH = 1.01  # a scaled gradient's norm is at most this many times the one before
_TINY = 1e-8
_SCALES = ("channel", "tensor")


class Apollo(PerParameter):
    name: ClassVar[str] = "apollo"
    paper: ClassVar[str] = "Zhu et al. 2025, arXiv 2412.05270"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: str = "channel",
        scale_front: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        """`scale`: its root multiplies the update, before the norm's growth is limited if `scale_front`, else after."""
        options = {
            "lr": lr,
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "scale": scale,
            "scale_type": scale_type,
            "scale_front": scale_front,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "seed": seed,
        }
        super().__init__(params, options, unknown)

    @staticmethod
    def groups(model: nn.Module, **options: Any) -> list[Group]:
        """A model's inner matrices with the options (a rank among them), everything else for AdamW."""
        return matrix_groups(model, options)

    @staticmethod
    def usual(model: nn.Module) -> dict[str, Any]:
        return {"rank": usual_rank(model)}

    def _check(self, group: Group) -> None:
        check_matrices(self.name, group)
        if group["scale_type"] not in _SCALES:
            raise unknown_name("scale_type of apollo", str(group["scale_type"]), _SCALES)
        number_seeds(self, group)

    def _bytes(self, p: torch.Tensor, group: Group) -> int:
        size = compute_dtype(p).itemsize
        if group["rank"] is None:
            return 2 * moment_bytes(p.numel(), 32, size)
        return 2 * moment_bytes(group["rank"] * max(p.shape), 32, size) + size

    def _alone(self, group: Group) -> Sequence[str]:
        return MOMENTS if group["rank"] is None else ()

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        step = state.get("step", 0)
        if group["rank"] is None:
            update = adam_direction(grad, state, betas=group["betas"], eps=group["eps"])
        else:
            update = _scaled(grad, state, group, step)
        state["step"] = step + 1
        value.add_(update, alpha=-corrected(float(group["lr"]), step + 1, group["betas"]))
        if group["weight_decay"]:
            value.add_(value, alpha=-float(group["lr"]) * group["weight_decay"])


def _scaled(grad: torch.Tensor, state: State, group: Group, step: int) -> torch.Tensor:
    """The gradient with each channel as long as Adam would make it, as far as the sketch tells; its norm grows slowly."""
    seed = seed_of(state, group)
    if step and step % group["update_proj_gap"] == 0:
        seed = next_seed(seed)
    state["seed"] = seed
    left = is_left(grad.shape)
    low = down(grad, gaussian(seed, group["rank"], min(grad.shape), grad), left=left)
    direction = adam_direction(low, state, betas=group["betas"], eps=group["eps"])
    update = grad * ratios(direction, low, left=left, per_channel=group["scale_type"] == "channel")
    root = float(group["scale"]) ** 0.5
    if group["scale_front"]:
        update.mul_(root)
    norm = torch.linalg.vector_norm(update)
    before = state.get("norm", torch.zeros_like(norm))
    limit = torch.where(before > 0, _GROWTH * before, norm)  # a norm of zero does not limit later ones to zero
    update.mul_((limit / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp_(max=1.0))
    state["norm"] = torch.minimum(norm, limit)
    return update if group["scale_front"] else update.mul_(root)


def ratios(direction: torch.Tensor, low: torch.Tensor, *, left: bool, per_channel: bool) -> torch.Tensor:
    """The norm of Adam's direction over that of the gradient: per channel of the longer side, or for the whole matrix."""
    side = (0 if left else 1) if per_channel else (0, 1)
    above: torch.Tensor = torch.linalg.vector_norm(direction, dim=side, keepdim=True)
    below: torch.Tensor = torch.linalg.vector_norm(low, dim=side, keepdim=True)
    return above / (below + _TINY)
