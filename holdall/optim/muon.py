"""Muon: a momentum whose singular values are brought near one, for the matrices inside a model; AdamW for everything else.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon), and Liu et
al., "Muon is Scalable for LLM Training", arXiv 2502.16982. The momentum B of a matrix is a running mean of gradients, looked
ahead by Nesterov's rule; with B = U S V^T the update is close to U V^T. Five Newton-Schulz steps X <- a X + (b A + c A^2) X,
A = X X^T, from X = B / |B|, take the place of an SVD. Their coefficients are steep at zero and do not converge to one: large
singular values end between about 0.7 and 1.2, the smallest below. The steps are computed in bf16, for parameters of 64 bits
in 64.

The rate of an n x m matrix is lr sqrt(max(1, n / m)) with `adjust="original"` (the post) and 0.2 lr sqrt(max(n, m)) with
`adjust="match_rms_adamw"` (the paper), whose update is as large as AdamW's: then one `lr` serves both groups.

State of an n x m matrix: the momentum, nm numbers, half of AdamW's. Temporaries: one tensor of the parameter's size in 32
bits, and two in 16 with two squares of the shorter side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdall.errors import InvalidInput, unknown_name
from holdall.optim._math.moments import MOMENTS, adamw_, read_moment
from holdall.optim._math.per_parameter import Group, PerParameter, State, compute_dtype
from holdall.optim._math.projection import matrix_groups

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of the post
_TINY = 1e-7  # a norm below it counts as so large
_ADJUSTMENTS = ("match_rms_adamw", "original")


class Muon(PerParameter):
    """`orthogonalise`: False for a group that AdamW trains, with `betas` and `eps`. `momentum`, `nesterov`, `ns_steps` and
    `adjust` belong to the matrices. Weight decay is decoupled and has the plain `lr`."""

    name: ClassVar[str] = "muon"
    paper: ClassVar[str] = "Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust: str = "match_rms_adamw",
        orthogonalise: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **unknown: Any,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust": adjust,
            "orthogonalise": orthogonalise,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, options, unknown)

    @staticmethod
    def groups(model: nn.Module, *, adamw_lr: float | None = None, **options: Any) -> list[Group]:
        """A model's inner matrices with the options; embeddings, head and vectors for AdamW, at `adamw_lr` if given."""
        inner, *rest = matrix_groups(model, options)
        rate = {} if adamw_lr is None else {"lr": adamw_lr}
        return [inner, *({**options, **rate, **group, "orthogonalise": False} for group in rest)]

    def _check(self, group: Group) -> None:
        if not 0 <= group["momentum"] < 1:
            raise InvalidInput(f"`momentum` is {group['momentum']}, but must be at least 0 and below 1", hint="usual: 0.95")
        if not isinstance(group["ns_steps"], int) or group["ns_steps"] < 1:
            raise InvalidInput(f"`ns_steps` is {group['ns_steps']!r}, but must be a whole number above 0", hint="usual: 5")
        if group["adjust"] not in _ADJUSTMENTS:
            raise unknown_name("adjust of muon", str(group["adjust"]), _ADJUSTMENTS)
        for p in group["params"] if group["orthogonalise"] else ():
            if p.dim() != 2:
                raise InvalidInput(
                    f"muon cannot orthogonalise a parameter of shape {tuple(p.shape)}",
                    hint="use `Muon.groups(model)`, or a group with orthogonalise=False for what is no matrix",
                )

    def _bytes(self, p: Tensor, group: Group) -> int:
        return compute_dtype(p).itemsize * p.numel() * (1 if group["orthogonalise"] else 2)

    def _alone(self, group: Group) -> Sequence[str]:
        return () if group["orthogonalise"] else MOMENTS

    def _update(self, value: Tensor, grad: Tensor, state: State, group: Group) -> None:
        lr = float(group["lr"])
        if not group["orthogonalise"]:
            state["step"] = step = state.get("step", 0) + 1
            for key in MOMENTS:
                state[key] = read_moment(state, key, value, signed=True)
            adamw_(value, grad, [state[key] for key in MOMENTS], step, group)
            return
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(value)
        mean: Tensor = state["momentum"].lerp_(grad, 1 - group["momentum"])
        direction = orthogonalised(grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean, group["ns_steps"])
        if group["weight_decay"]:
            value.mul_(1 - lr * group["weight_decay"])
        value.add_(direction, alpha=-lr * factor(value.shape, group["adjust"]))


def factor(shape: torch.Size, adjust: str) -> float:
    """The factor of a matrix' learning rate over the group's `lr`."""
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """U S' V^T for a matrix U S V^T, with S' near one: Newton-Schulz steps on the shorter side."""
    mesh = getattr(matrix, "device_mesh", None)
    if mesh is not None:  # singular values need all rows: every rank gathers the whole matrix
        from torch.distributed.tensor import distribute_tensor

        whole = orthogonalised(matrix.full_tensor(), steps)  # type: ignore[attr-defined]
        return distribute_tensor(whole, mesh, matrix.placements, src_data_rank=None)  # type: ignore[attr-defined]
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    narrow = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    x = narrow.mT if tall else narrow
    x = x / torch.linalg.vector_norm(x).clamp(min=_TINY)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
