"""CompAct: linear layers save a random sketch of their input, and Adam's moments are those of the sketched gradients.

Shamshoum et al., "CompAct: Compressed Activations for Memory-Efficient LLM Training", NAACL 2025, arXiv 2410.15352.

    optimizer = Compact(Compact.groups(model, rank=128), lr=1e-3)
    with optimizer.sketching(model):
        ...  # the loop as it was

For a weight (outputs, inputs) with a rank: z = x P is kept in place of x, P of N(0, 1/rank) from a seed; backward makes
G P, (outputs, rank); Adam's moments are of that shape; the update is `scale` D P^T. The seed changes every `update_proj_gap`
steps, after a step and never between a forward and its step, so micro-batches add up; moments stay as they are. Weights outside
of sketched layers are projected when their gradient is there, and groups without a rank are trained by AdamW. A sketched weight
has no `.grad`: clip with `clip_grad_norm_` of the optimizer, whose norm is the sketches', close to the true one but not it.
A layer's sketch needs no other layer's gradient, so updates in backward (`in_backward`) are those of the step; there `.grad`
has the weight's shape and the sketch's bytes until the update, and `max_norm=` clips by the same norm.
Memory is saved only for inputs that no other op saves: an input that is the saved output of a nonlinearity (tanh, relu) stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdall.errors import InvalidInput, unknown_name
from holdall.layers.sketched_linear import Key, SketchedGradient, sketching
from holdall.optim._math.moments import MOMENTS, adam_direction, corrected, moment_bytes
from holdall.optim._math.per_parameter import Group, PerParameter, State, compute_dtype, number_seeds, seed_of
from holdall.optim._math.projection import down, gaussian, matrix_groups, next_seed, usual_rank

_PROJECTIONS = ("gaussian", "orthogonal")


class Compact(PerParameter):
    """`projection`: "gaussian", or "orthogonal" (exact at full rank). `scale`: of the update of weights with a rank."""

    name: ClassVar[str] = "compact"
    paper: ClassVar[str] = "Shamshoum et al. 2025, arXiv 2410.15352"
    exact: ClassVar[bool] = False

    sketches_are_gradients: bool = False  # sketches are passed on as gradients, for updates in backward

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        projection: str = "gaussian",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        options = {
            "lr": lr,
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "scale": scale,
            "projection": projection,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "seed": seed,
        }
        self._sketched: dict[int, Tensor] = {}  # by parameter: sketched gradients since `zero_grad`
        super().__init__(params, options, unknown)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_sketched", {})  # a copy has the groups and states only

    @staticmethod
    def groups(model: nn.Module, **options: Any) -> list[Group]:
        """A model's inner matrices with the options (a rank among them), everything else for AdamW."""
        return matrix_groups(model, options)

    @staticmethod
    def usual(model: nn.Module) -> dict[str, Any]:
        return {"rank": usual_rank(model)}

    @contextmanager
    def sketching(self, model: nn.Module) -> Iterator[list[nn.Linear]]:
        """Inside, linear layers whose weights have a rank save sketches; the layers are restored on exit."""
        ranked = {id(p) for group in self.param_groups if group["rank"] for p in group["params"] if p.requires_grad}
        with sketching(model, self, lambda weight: id(weight) in ranked) as layers:
            yield layers

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sketched.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch's, over gradients and sketched gradients together; the norm that a sketch has is right on average only."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        every = [*grads, *self._sketched.values()]
        if not every:
            raise InvalidInput("there is no gradient to clip", hint="call backward first")
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in every]))
        for grad in every:
            grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    # -- for the sketched layers

    def key_for(self, weight: Tensor, shared: Key | None) -> Key:
        state, group = self.state[weight], self._group_of(weight)
        is_new = "exp_avg" not in state and id(weight) not in self._sketched and weight.grad is None
        if shared is not None and is_new:
            state["seed"] = shared[0]  # the same input: one sketch serves both
        return seed_of(state, group), group["rank"], group["projection"]

    def projector(self, weight: Tensor, like: Tensor) -> Tensor:
        """(rank, inputs), in the precision of `like`, from the weight's seed."""
        return _projector(self.state[weight], self._group_of(weight), weight.shape[1], weight).to(like.dtype)

    def take(self, weight: Tensor, low: Tensor) -> Tensor | None:
        if self.sketches_are_gradients:
            return SketchedGradient(low.to(weight.dtype), weight)
        kept = self._sketched.get(id(weight))  # in the weight's dtype, as its gradient would be
        self._sketched[id(weight)] = low.to(weight.dtype) if kept is None else kept.add_(low)
        return None

    # -- the update rule

    def _check(self, group: Group) -> None:
        if group["projection"] not in _PROJECTIONS:
            raise unknown_name("projection of compact", str(group["projection"]), _PROJECTIONS)
        for p in group["params"] if group["rank"] else ():
            if p.dim() != 2 or group["rank"] > p.shape[1]:
                raise InvalidInput(
                    f"compact cannot project a parameter of shape {tuple(p.shape)} to rank {group['rank']}",
                    hint="groups with a rank are for matrices with so many inputs; see `Compact.groups(model, rank=...)`",
                )
        number_seeds(self, group)

    def _gradient(self, p: Tensor, group: Group) -> Tensor | None:
        """For a weight with a rank: its sketched gradient, plus the sketch of a full gradient if there is one."""
        if group["rank"] is None or (p.grad is not None and p.grad.layout != torch.strided):
            return p.grad
        if isinstance(p.grad, SketchedGradient):
            return p.grad.low
        low = self._sketched.get(id(p))
        if p.grad is not None:
            projector = _projector(self.state[p], group, p.shape[1], p)
            whole = down(p.grad.to(projector.dtype), projector, left=False)
            low = whole if low is None else whole.add_(low)
        return low

    def _alone(self, group: Group) -> Sequence[str]:
        return MOMENTS if group["rank"] is None else ()

    def _update(self, value: Tensor, grad: Tensor, state: State, group: Group) -> None:
        state["step"] = step = state.get("step", 0) + 1
        lr = float(group["lr"])
        size = corrected(lr, step, group["betas"])
        direction = adam_direction(grad, state, betas=group["betas"], eps=group["eps"])
        if group["weight_decay"]:
            value.mul_(1 - lr * group["weight_decay"])
        if group["rank"] is None:
            value.add_(direction, alpha=-size)
            return
        projector = _projector(state, group, value.shape[1], value)
        value.addmm_(direction, projector, alpha=-size * float(group["scale"]))
        if step % group["update_proj_gap"] == 0:
            state["seed"] = next_seed(seed_of(state, group))

    def _bytes(self, p: Tensor, group: Group) -> int:
        numel = p.numel() if group["rank"] is None else p.shape[0] * group["rank"]
        return 2 * moment_bytes(numel, 32, compute_dtype(p).itemsize)


def _projector(state: State, group: Group, inputs: int, like: Tensor) -> Tensor:
    """P^T, (rank, inputs), with E[P P^T] = 1."""
    wide = torch.empty(0, dtype=compute_dtype(like), device=like.device)
    drawn = gaussian(seed_of(state, group), group["rank"], inputs, wide)
    if group["projection"] == "orthogonal":
        drawn = torch.linalg.qr(drawn.t())[0].t().mul_((inputs / group["rank"]) ** 0.5)
    return drawn
