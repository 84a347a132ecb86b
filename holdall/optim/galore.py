"""GaLore: Adam in the space of the gradient's leading singular vectors, which is recomputed every `update_proj_gap` steps.

Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", ICML 2024, arXiv 2403.03507. A group
with a rank holds matrices; one without is trained by AdamW. Plain options are the authors' code, step by step: the basis is
refreshed from the current gradient at steps 0, T, 2T..., T being `update_proj_gap`, and the moments are left as they are.

Beyond it: `bits=8` keeps the moments in 8-bit blocks (8-bit GaLore). `projector_bits=4` and `lazy=True` are Q-GaLore's (Zhang
et al. 2024, arXiv 2407.08296): a projector of 4 bits, and a T that doubles once a matrix' first direction has stayed (a mean
cosine of 0.4 over five refreshes). Its int8 weights with stochastic rounding are `holdall.layers.int8_weight`, which this and
other optimizers train. `basis="iteration"` finds the directions by subspace iteration from those before, without an SVD, as
GaLore 2 does in kind (arXiv 2504.20437). `rotate=True` carries the first moment over into a new basis; ours, off by default.

State of an n x m matrix, n <= m: projector 4 rank n, moments 8 rank m bytes. Temporaries: two tensors of the parameter's
size, at a refresh by SVD three more; parameters of AdamW are updated a slice at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from holdall.errors import InvalidInput, unknown_name
from holdall.optim._math.moments import MOMENTS, adam_direction, corrected, moment_bytes, read_moment, write_moment
from holdall.optim._math.per_parameter import Group, PerParameter, State, compute_dtype, number_seeds, seed_of
from holdall.optim._math.projection import check_matrices, down, is_left, matrix_groups, up, usual_rank
from holdall.optim._math.subspace import leading, leading_left, projector_bytes, read_projector, write_projector

_TYPES = ("std", "reverse_std", "left", "right", "full")
_BASES = ("svd", "iteration")
_REMEMBERED, _ALIKE = 5, 0.4  # refreshes looked at, and the mean cosine from which on the basis counts as steady


class GaLore(PerParameter):
    name: ClassVar[str] = "galore"
    paper: ClassVar[str] = "Zhao et al. 2024, arXiv 2403.03507"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        basis: str = "svd",
        bits: int = 32,
        projector_bits: int = 32,
        lazy: bool = False,
        rotate: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        """`proj_type`: the side that is projected: the shorter (std), the longer (reverse_std), left, right, or both (full)."""
        options = {
            "lr": lr,
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "scale": scale,
            "proj_type": proj_type,
            "basis": basis,
            "bits": bits,
            "projector_bits": projector_bits,
            "lazy": lazy,
            "rotate": rotate,
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
        for key, known in (("proj_type", _TYPES), ("basis", _BASES)):
            if group[key] not in known:
                raise unknown_name(f"{key} of galore", str(group[key]), known)
        for key, sizes in (("bits", (8, 32)), ("projector_bits", (4, 8, 32))):
            if group[key] not in sizes:
                listed = " or ".join(map(str, sizes))
                raise InvalidInput(f"`{key}` is {group[key]!r}, but galore has {listed}", hint=f"use {key}={sizes[0]}")
        number_seeds(self, group)

    def _bytes(self, p: torch.Tensor, group: Group) -> int:
        size, rank = compute_dtype(p).itemsize, group["rank"]
        if rank is None:
            return 2 * moment_bytes(p.numel(), group["bits"], size)
        sides = _sides(p.shape, group["proj_type"])
        numel = rank * (rank if len(sides) == 2 else p.numel() // p.shape[next(iter(sides.values()))])
        held = sum(projector_bytes(rank * p.shape[d], group["projector_bits"], size) for d in sides.values())
        return 2 * moment_bytes(numel, group["bits"], size) + held

    def _alone(self, group: Group) -> Sequence[str]:
        return MOMENTS if group["rank"] is None and group["bits"] == 32 else ()

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        step, betas = state.get("step", 0), group["betas"]
        adam = {"betas": betas, "eps": group["eps"], "bits": group["bits"]}
        if group["rank"] is None:
            update = adam_direction(grad, state, **adam)
        else:
            if step % state.get("gap", group["update_proj_gap"]) == 0:
                _refresh(grad, state, group)
            projectors = _projectors(grad, state, group)
            low = grad
            for side, projector in projectors.items():
                low = down(low, projector, left=side == "left")
            update = adam_direction(low, state, **adam)
            for side, projector in projectors.items():
                update = up(update, projector, left=side == "left")
            update.mul_(group["scale"])
        state["step"] = step + 1
        value.add_(update, alpha=-corrected(float(group["lr"]), step + 1, betas))
        if group["weight_decay"]:
            value.add_(value, alpha=-float(group["lr"]) * group["weight_decay"])


def _sides(shape: torch.Size, proj_type: str) -> dict[str, int]:
    """The sides that are projected, with their dimension."""
    shorter = "left" if is_left(shape) else "right"
    longer = "right" if is_left(shape) else "left"
    chosen = {"std": (shorter,), "reverse_std": (longer,), "full": ("left", "right")}.get(proj_type, (proj_type,))
    return {side: 0 if side == "left" else 1 for side in chosen}


def _projectors(grad: torch.Tensor, state: State, group: Group) -> dict[str, torch.Tensor]:
    return {
        side: read_projector(state, _key(side), group["rank"], grad.shape[d], grad, bits=group["projector_bits"])
        for side, d in _sides(grad.shape, group["proj_type"]).items()
    }


def _key(side: str) -> str:
    return f"projector_{side}"


def _refresh(grad: torch.Tensor, state: State, group: Group) -> None:
    """Recompute the basis from the current gradient, and measure how far it has turned."""
    sides = _sides(grad.shape, group["proj_type"])
    before = _projectors(grad, state, group) if _key(next(iter(sides))) in state else {}
    now: dict[str, torch.Tensor] = {}
    if group["basis"] == "svd":
        both = dict(zip(("left", "right"), leading(grad, group["rank"]), strict=True))
        now = {side: both[side] for side in sides}
    else:
        for side in sides:
            matrix = grad if side == "left" else grad.mT
            now[side] = leading_left(matrix, group["rank"], begin=before.get(side), seed=seed_of(state, group))
    for side, projector in now.items():
        write_projector(state, _key(side), projector, bits=group["projector_bits"])
    if before and group["rotate"]:
        _rotate(state, group, before, now)
    if before and group["lazy"]:
        first = next(iter(sides))
        _grow_lazy(state, group, float(torch.cosine_similarity(before[first][0], now[first][0], dim=0)))


def _grow_lazy(state: State, group: Group, cosine: float) -> None:
    """Q-GaLore's rule. A singular vector's sign means nothing, so a cosine's does not either."""
    state["cosines"] = [*state.get("cosines", []), abs(cosine)][-_REMEMBERED:]
    if len(state["cosines"]) == _REMEMBERED and sum(state["cosines"]) / _REMEMBERED >= _ALIKE:
        state["gap"] = 2 * int(state.get("gap") or group["update_proj_gap"])


def _rotate(state: State, group: Group, before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    """Project the first moment onto the new basis."""
    sides = {side: projector.shape[1] for side, projector in now.items()}
    left, right = sides.get("left"), sides.get("right")
    rank = group["rank"]
    numel = state["exp_avg"].numel()
    shape = (rank, rank) if left and right else (rank, numel // rank) if left else (numel // rank, rank)
    like = next(iter(now.values())).new_empty(shape)
    moment = read_moment(state, "exp_avg", like, signed=True)
    for side, projector in now.items():
        turn = projector @ before[side].mT  # (rank, rank)
        moment = turn @ moment if side == "left" else moment @ turn.mT
    write_moment(state, "exp_avg", moment.contiguous(), bits=group["bits"], signed=True)
