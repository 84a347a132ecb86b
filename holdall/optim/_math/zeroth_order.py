"""Gradient estimates from losses alone: by coordinates (CGE) or along random directions (RGE), and losses that can be
restarted.

Closures return a loss and call no backward. Every evaluation draws the same random numbers, and parameters are unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdall.errors import InvalidInput, Unsupported
from holdall.optim._math.per_parameter import compute_dtype
from holdall.optim._math.perturbed import Perturbed
from holdall.optim._math.rng import generator, rewound

Closure = Callable[[], Any]


class ChainLoss:
    """The loss of a chain of modules; it can be recomputed from the module whose parameter changed.

    Calling it runs the whole chain and keeps the input of every module; `restart(param)` runs from the module that has the
    parameter. Both give the same bits. Buffers (BatchNorm's statistics) are updated by whole runs only.
    """

    def __init__(self, chain: nn.Sequential | Sequence[nn.Module], x: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        self._modules, self._x, self._loss = list(chain), x, loss
        self._place: dict[int, int] = {}
        for k, module in enumerate(self._modules):
            for param in module.parameters():
                self._place.setdefault(id(param), k)
        self._inputs: list[Tensor] = []
        self._ends: list[float] = []  # seconds from the beginning of each module to the end of the chain
        self.modules_run = 0

    def __call__(self) -> Tensor:
        self._refuse_chance()
        self._inputs, began = [], []
        x = self._x
        for module in self._modules:
            self._inputs.append(x)
            began.append(time.perf_counter())
            x = module(x)
            self.modules_run += 1
        loss = self._loss(x)
        self._ends = [time.perf_counter() - at for at in began]
        return loss

    def restart(self, param: Tensor) -> Tensor:
        """The loss with the current value of this parameter; earlier modules are as in the last whole run."""
        k = self._place.get(id(param))
        if k is None or not self._inputs:
            raise InvalidInput(
                "this parameter is not in the chain, or the chain was not run yet",
                hint="call the chain once on a whole batch first",
            )
        kept = [(b, b.clone()) for module in self._modules[k:] if module.training for b in module.buffers()]
        x = self._inputs[k]
        for module in self._modules[k:]:
            x = module(x)
            self.modules_run += 1
        loss = self._loss(x)
        for buffer, before in kept:
            buffer.copy_(before)
        return loss

    def cost(self, param: Tensor) -> float:
        """Seconds of a restart for this parameter, as measured in the last whole run."""
        return self._ends[self._place[id(param)]] if self._ends else 1.0

    def _refuse_chance(self) -> None:
        dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
        if any(isinstance(m, dropouts) and m.training and m.p > 0 for part in self._modules for m in part.modules()):
            raise Unsupported("a chain with dropout cannot be restarted in the middle", hint="call `eval()` on its dropouts")


def coordinate_slopes(param: Tensor, indices: Sequence[int], closure: Closure, base: float, mu: float) -> list[float]:
    """CGE: (f(p + mu e_i) - f(p)) / mu for each index; the quotient uses the step as it was rounded."""
    restart = getattr(closure, "restart", None)
    evaluate = closure if restart is None else lambda: restart(param)
    values, found = param.detach(), []
    for index in indices:
        cell = (
            values[torch.unravel_index(torch.tensor(index), values.shape)]
            if not values.is_contiguous()
            else values.view(-1)[index]
        )
        before = cell.clone()
        try:
            cell.add_(mu)
            moved = float(cell) - float(before)
            with rewound([param.device]):
                loss = float(evaluate())
        finally:
            cell.copy_(before)
        found.append((loss - base) / moved if moved else 0.0)
    return found


def base_loss(closure: Closure, device: torch.device) -> float:
    """The loss at the current parameters; a `ChainLoss` keeps the inputs for restarts."""
    with rewound([device]):
        loss = float(closure())
    if not math.isfinite(loss):
        raise InvalidInput(
            f"the loss is {loss}, so the step was not made", hint="use another batch, or start from other parameters"
        )
    return loss


@torch.no_grad()
def random_gradient(params: Sequence[Tensor], closure: Closure, *, queries: int, mu: float, seed: int) -> list[Tensor]:
    """RGE: slopes along `queries` random directions, each tensor's of length one, averaged and scaled to be unbiased."""
    device = params[0].device
    base = base_loss(closure, device)
    found = [torch.zeros_like(p, dtype=compute_dtype(p)) for p in params]
    for query in range(queries):

        def moved(n: int, param: Tensor, query: int = query) -> Tensor:
            return _direction(param, seed, query, n).mul_(mu).add_(param).to(param.dtype)

        with rewound([device]), Perturbed(enumerate(params), moved):
            loss = float(closure())
        slope = (loss - base) / mu / queries
        for n, (param, total) in enumerate(zip(params, found, strict=True)):
            total.add_(_direction(param, seed, query, n), alpha=slope * param.numel())
    return found


def _direction(param: Tensor, seed: int, query: int, n: int) -> Tensor:
    z = torch.empty_like(param, dtype=compute_dtype(param)).normal_(generator=generator(param.device, seed, query, n))
    return z.div_(torch.linalg.vector_norm(z))


@torch.no_grad()
def grasp_keeps(
    params: Sequence[Tensor], closure: Closure, *, sparsity: float, queries: int, mu: float, reach: float, seed: int
) -> list[float]:
    """ZO-GraSP: what share of each tensor survives when the least |p * Hg| of all are pruned.

    Hg is (g(p + reach g) - g(p)) / reach with random gradient estimates along the same directions.
    """
    here = random_gradient(params, closure, queries=queries, mu=mu, seed=seed)
    before = [p.detach().clone() for p in params]
    try:
        for p, g in zip(params, here, strict=True):
            p.add_(g, alpha=reach)
        there = random_gradient(params, closure, queries=queries, mu=mu, seed=seed)
    finally:
        for p, old in zip(params, before, strict=True):
            p.copy_(old)
    scores = [(p * (g1 - g0) / reach).abs().flatten() for p, g0, g1 in zip(params, here, there, strict=True)]
    every = torch.cat(scores)
    keep = round((1 - sparsity) * every.numel())
    chosen = torch.zeros_like(every, dtype=torch.bool)
    chosen[torch.topk(every, keep).indices] = True
    return [float(part.float().mean()) for part in chosen.split([p.numel() for p in params])]


@dataclass(frozen=True, kw_only=True)
class ParameterSpan:
    """Coordinates number `begin` to `end` of a parameter's kept ones."""

    param: int
    begin: int
    end: int


def share(counts: Sequence[int], costs: Sequence[float], worker: int, workers: int) -> list[ParameterSpan]:
    """The coordinates that one of several workers evaluates: a range with an equal share of the cost."""
    total = sum(count * cost for count, cost in zip(counts, costs, strict=True))
    spans, start = [], 0.0
    for n, (count, cost) in enumerate(zip(counts, costs, strict=True)):
        first, last = (
            count if k == workers else min(count, max(0, math.ceil((total * k / workers - start) / cost))) if k else 0
            for k in (worker, worker + 1)
        )
        if first < last:
            spans.append(ParameterSpan(param=n, begin=first, end=last))
        start += count * cost
    return spans
