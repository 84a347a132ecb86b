"""FLORA: the momentum, and accumulated gradients, as random sketches whose projection changes now and then.

Hao et al., "Flora: Low-Rank Adapters Are Secretly Gradient Compressors", ICML 2024, arXiv 2402.03293. Adafactor's direction
with a momentum that is kept as M = A u, A random of `rank` rows, drawn from a seed and never stored; every `kappa` steps M is
carried over to the next seed's A. Matrices with a side below the rank, or one side more than four times the other
(embeddings), and vectors have a plain momentum.

With `accumulates=True` the gradients of several micro-batches are summed as a sketch and freed at once, so that gradient
accumulation takes little memory:

    with optimizer.sketching():
        for batch in micro_batches:
            loss(batch).backward()
    optimizer.step()

State of a sketched n x m matrix: 4 rank max(n, m) bytes for the momentum, as many for the accumulator, 4 (n + m) for
Adafactor's means. Temporaries: three tensors of the parameter's size and one projector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch

from holdall.errors import InvalidInput
from holdall.optim._math.factored import factored_direction, factored_elements
from holdall.optim._math.moments import moment_bytes, read_moment, write_moment
from holdall.optim._math.per_parameter import Group, PerParameter, State, clip_rms_, compute_dtype, number_seeds, rms, seed_of
from holdall.optim._math.projection import down, gaussian, is_left, next_seed, up

_SLENDER = 4  # a matrix with one side more than this many times the other is taken for an embedding


class Flora(PerParameter):
    name: ClassVar[str] = "flora"
    paper: ClassVar[str] = "Hao et al. 2024, arXiv 2402.03293"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        rank: int = 256,
        kappa: int = 1000,
        beta1: float = 0.9,
        decay_rate: float = -0.8,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        bits: int = 32,
        accumulates: bool = False,
        weight_decay: float = 0.0,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        """`lr`: the step relative to the parameter's own size, as Adafactor's. `bits=8`: the momentum in 8-bit blocks."""
        options = {
            "lr": lr,
            "rank": rank,
            "kappa": kappa,
            "beta1": beta1,
            "decay_rate": decay_rate,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "bits": bits,
            "accumulates": accumulates,
            "weight_decay": weight_decay,
            "seed": seed,
        }
        super().__init__(params, options, unknown)

    def accumulate(self, param: torch.Tensor) -> None:
        """Add the parameter's gradient to its sketch and free the gradient; a parameter without a sketch keeps it."""
        group = self._group_of(param)
        if not group["accumulates"]:
            raise InvalidInput(
                "`accumulate` needs a group that sketches gradients",
                hint="make the optimizer with `Flora(..., accumulates=True)`",
            )
        self._sketch(param, group)

    @contextmanager
    def sketching(self) -> Iterator[None]:
        """Inside, each gradient is sketched in backward as soon as it is complete. The hooks are removed on exit."""
        hooks = []
        try:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.requires_grad and group["accumulates"]:
                        hooks.append(p.register_post_accumulate_grad_hook(partial(self._sketch, group=group)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _sketch(self, p: torch.Tensor, group: Group) -> None:
        if p.grad is not None and is_sketched(p.shape, group["rank"]):
            with torch.no_grad():
                _add_to_sketch(p.grad.to(compute_dtype(p)), self.state[p], group)
            p.grad = None

    def _gradient(self, p: torch.Tensor, group: Group) -> torch.Tensor | None:
        """The sum of the sketched gradients at full size, or the gradient itself."""
        state: State = self.state.get(p, {})
        if not state.get("sketched"):
            return p.grad
        if p.grad is not None:  # of a backward outside of `sketching`
            self._sketch(p, group)
        grad = up(state["sketch"], _sketcher(state["sketch"], p.shape, state, group), left=is_left(p.shape))
        state["sketch"].zero_()
        state["sketched"], state["sketch_seed"] = 0, next_seed(state["sketch_seed"])
        return grad

    def _check(self, group: Group) -> None:
        if not 0 <= group["beta1"] < 1:
            raise InvalidInput(f"`beta1` is {group['beta1']}, but must be at least 0 and below 1", hint="usual: 0.9")
        if group["bits"] not in (8, 32):
            raise InvalidInput(f"`bits` is {group['bits']!r}, but flora has 8 or 32", hint="use bits=8")
        number_seeds(self, group)

    def _bytes(self, p: torch.Tensor, group: Group) -> int:
        size = compute_dtype(p).itemsize
        sketched = is_sketched(p.shape, group["rank"])
        numel = group["rank"] * max(p.shape) if sketched else p.numel()
        momentum = moment_bytes(numel, group["bits"], size) if group["beta1"] else 0
        return momentum + size * (factored_elements(p.shape) + (numel if sketched and group["accumulates"] else 0))

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        state["step"] = state.get("step", 0) + 1
        eps1, eps2 = group["eps"]
        update = factored_direction(grad, state, beta=1 - state["step"] ** group["decay_rate"], eps=eps1)
        if group["beta1"]:
            sketched = is_sketched(grad.shape, group["rank"])
            update = _with_sketched_momentum(update, state, group) if sketched else _with_momentum(update, state, group)
        clip_rms_(update, group["clip_threshold"])
        alpha = rms(value).clamp_(min=eps2) * float(group["lr"])
        if group["weight_decay"]:
            value.sub_(value * (alpha * group["weight_decay"]))
        value.sub_(update.mul_(alpha))


def is_sketched(shape: torch.Size, rank: int) -> bool:
    """Is a tensor of this shape sketched?"""
    return len(shape) == 2 and rank <= min(shape) and max(shape) <= _SLENDER * min(shape)


def _with_momentum(update: torch.Tensor, state: State, group: Group) -> torch.Tensor:
    beta = group["beta1"]
    momentum = read_moment(state, "exp_avg", update, signed=True).mul_(beta).add_(update, alpha=1 - beta)
    write_moment(state, "exp_avg", momentum, bits=group["bits"], signed=True)
    return update.copy_(momentum)


def _with_sketched_momentum(update: torch.Tensor, state: State, group: Group) -> torch.Tensor:
    """(1 - b) u + b up(M); then M moves on, to another seed if it is time."""
    beta, rank, left = group["beta1"], group["rank"], is_left(update.shape)
    seed, short = seed_of(state, group), min(update.shape)
    projector = gaussian(seed, rank, short, update)
    like = update.new_empty((rank, update.shape[1]) if left else (update.shape[0], rank))
    sketch = read_moment(state, "exp_avg", like, signed=True)
    whole = up(sketch, projector, left=left)
    if state["step"] % group["kappa"] == 0:
        seed = next_seed(seed)
        projector = gaussian(seed, rank, short, update)
        sketch.copy_(down(whole, projector, left=left))
    state["seed"] = seed
    sketch.mul_(beta).add_(down(update, projector, left=left), alpha=1 - beta)
    write_moment(state, "exp_avg", sketch, bits=group["bits"], signed=True)
    return whole.mul_(beta).add_(update, alpha=1 - beta)


def _sketcher(like: torch.Tensor, shape: torch.Size, state: State, group: Group) -> torch.Tensor:
    """The projector of the accumulator, whose seed changes with every step."""
    return gaussian(state["sketch_seed"], group["rank"], min(shape), like)


def _add_to_sketch(grad: torch.Tensor, state: State, group: Group) -> None:
    # a chain of its own, so that the accumulator's projection is not the momentum's
    state.setdefault("sketch_seed", next_seed(seed_of(state, group)))
    low = down(grad, _sketcher(grad, grad.shape, state, group), left=is_left(grad.shape))
    if "sketch" in state:
        state["sketch"].add_(low)
    else:
        state["sketch"] = low
    state["sketched"] = state.get("sketched", 0) + 1
