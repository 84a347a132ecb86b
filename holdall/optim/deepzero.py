"""DeepZero: training from scratch without backward, one finite difference for each coordinate of a sparse, changing mask.

Chen et al., "DeepZero: Scaling up Zeroth-Order Optimization for Deep Model Training", ICLR 2024, arXiv 2310.02025.
Coordinate-wise estimates (CGE) over a random mask that is drawn anew every `shuffle_every` steps; weights stay dense; SGD with
momentum. How much of each layer the mask keeps is what ZO-GraSP finds at initialisation (`prune`). Losses given as a
`ChainLoss` are taken up again at the module that changed; several workers share the coordinates, and find the same gradient.

Cost: a forward, or its rest, for each kept coordinate. State: the momentum; memory is otherwise that of inference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from holdall.errors import InvalidInput
from holdall.optim._math.per_parameter import Group, PerParameter, compute_dtype
from holdall.optim._math.rng import generator
from holdall.optim._math.zeroth_order import ChainLoss, base_loss, coordinate_slopes, grasp_keeps, share

__all__ = ["ChainLoss", "DeepZero"]


class DeepZero(PerParameter):
    """`step(closure)`: the closure returns the loss without backward, or is a `ChainLoss`.

    `mu`: the step of the finite differences; None: the learning rate, as in the authors' code. `keep`: the share of
    coordinates in a group's masks, unless `prune` set one. `process_group`: its ranks split the coordinates.
    """

    name: ClassVar[str] = "deepzero"
    paper: ClassVar[str] = "Chen et al. 2024, arXiv 2310.02025"
    exact: ClassVar[bool] = False
    forward_only: ClassVar[bool] = True  # no gradients are computed or read

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        mu: float | None = 5e-3,
        keep: float = 1.0,
        shuffle_every: int = 100,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        **unknown: Any,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "mu": mu,
            "keep": keep,
            "shuffle_every": shuffle_every,
            "seed": seed,
        }
        self._process_group = process_group
        self._loss = 0.0  # before the step
        super().__init__(params, {**options, "steps": 0}, unknown)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy has only the groups and states
        self.__dict__.setdefault("_process_group", None)
        self.__dict__.setdefault("_loss", 0.0)

    def _check(self, group: Group) -> None:
        if not 0 < group["keep"] <= 1 or group["shuffle_every"] < 1:
            raise InvalidInput(
                f"`keep` is {group['keep']} and `shuffle_every` is {group['shuffle_every']}, which is out of range",
                hint="use 0 < keep <= 1 and shuffle_every >= 1",
            )
        if group["mu"] is not None and not group["mu"] > 0:
            raise InvalidInput(f"`mu` is {group['mu']}, but must be above 0", hint="usual: 5e-3")

    @torch.no_grad()
    def prune(
        self, closure: Callable[[], Any], *, sparsity: float = 0.9, queries: int = 192, mu: float = 5e-3, reach: float = 1e-2
    ) -> list[float]:
        """ZO-GraSP at initialisation: find, and keep in the state, the share of each parameter that masks will have."""
        if not 0 <= sparsity < 1:
            raise InvalidInput(
                f"`sparsity` is {sparsity}, but must be at least 0 and below 1",
                hint="give the share to prune, as in `prune(loss, sparsity=0.9)`",
            )
        params = [p for p, _ in self._trained()]
        seed = self.param_groups[0]["seed"]
        keeps = grasp_keeps(params, closure, sparsity=sparsity, queries=queries, mu=mu, reach=reach, seed=seed)
        for param, kept in zip(params, keeps, strict=True):
            self.state[param]["keep"] = kept
        return keeps

    def coordinates(self) -> list[Tensor]:
        """The mask of this step: for every trained parameter the flat indices that are estimated."""
        return [self._mask(n, param, group) for n, (param, group) in enumerate(self._trained())]

    @torch.no_grad()
    def slopes(self, closure: Callable[[], Any], *, worker: int = 0, workers: int = 1) -> list[Tensor]:
        """This worker's part of the gradient on the mask, zero elsewhere. The sum over workers is bitwise the whole."""
        trained, masks = self._trained(), self.coordinates()
        if masks and not any(mask.numel() for mask in masks):
            raise InvalidInput(
                "no parameter has a coordinate to estimate", hint="use a larger `keep`: it is a share of each parameter"
            )
        self._loss = base = base_loss(closure, self.param_groups[0]["params"][0].device)
        found = [torch.zeros(mask.numel(), dtype=torch.float64) for mask in masks]
        for span in share([mask.numel() for mask in masks], self._costs(closure), worker, workers):
            param, group = trained[span.param]
            mu = float(group["lr"]) if group["mu"] is None else group["mu"]
            indices = masks[span.param][span.begin : span.end].tolist()
            values = coordinate_slopes(param, indices, closure, base, mu)
            found[span.param][span.begin : span.end] = torch.tensor(values, dtype=torch.float64)
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Estimate the gradient, sum it over the workers, and update; returns the loss before the update."""
        if closure is None:
            raise InvalidInput(
                "DeepZero's `step` needs a closure, since it evaluates the loss at many points",
                hint="call `step(closure)` without any backward",
            )
        with torch.no_grad():
            if self._process_group is None:
                found = self.slopes(closure)
            else:
                worker, workers = dist.get_rank(self._process_group), dist.get_world_size(self._process_group)
                found = self.slopes(closure, worker=worker, workers=workers)
                every = torch.cat(found)
                dist.all_reduce(every, group=self._process_group)
                found = list(every.split([part.numel() for part in found]))
            self.apply(found)
        return self._loss

    @torch.no_grad()
    def apply(self, slopes: list[Tensor]) -> None:
        """Update with the gradient on this step's mask."""
        for (param, group), mask, values in zip(self._trained(), self.coordinates(), slopes, strict=True):
            dtype = compute_dtype(param)
            grad = torch.zeros(param.numel(), dtype=dtype, device=param.device)
            grad[mask] = values.to(dtype=dtype, device=param.device)
            self._apply(param, grad.view(param.shape), group)
        for group in self.param_groups:
            group["steps"] += 1

    def _update(self, value: Tensor, grad: Tensor, state: dict[str, Any], group: Group) -> None:
        lr = float(group["lr"])
        if group["momentum"]:
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(value)
            grad = state["momentum"].mul_(group["momentum"]).add_(grad)
        if group["weight_decay"]:
            value.mul_(1 - lr * group["weight_decay"])
        value.add_(grad, alpha=-lr)

    def _bytes(self, p: Tensor, group: Group) -> int:
        return p.numel() * compute_dtype(p).itemsize if group["momentum"] else 0

    def _mask(self, n: int, param: Tensor, group: Group) -> Tensor:
        keep = self.state[param].get("keep", group["keep"]) if param in self.state else group["keep"]
        count = round(keep * param.numel())
        if count == param.numel():
            return torch.arange(count)
        era = group["steps"] // group["shuffle_every"]
        source = generator(torch.device("cpu"), group["seed"], era, n)  # the same on every worker, whatever its device
        return torch.randperm(param.numel(), generator=source)[:count].sort().values

    def _costs(self, closure: Callable[[], Any]) -> list[float]:
        """Seconds of one evaluation by parameter, the same on every rank, so that all ranks split alike."""
        cost = getattr(closure, "cost", None)
        costs = torch.tensor([1.0 if cost is None else max(cost(p), 1e-9) for p, _ in self._trained()], dtype=torch.float64)
        if self._process_group is not None:
            dist.broadcast(costs, dist.get_global_rank(self._process_group, 0), group=self._process_group)
        return [float(c) for c in costs]

    def _trained(self) -> list[tuple[Tensor, Group]]:
        return [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
