"""MeZO: fine-tuning with forwards only. Two losses along a random direction give the slope; the direction is only a seed.

Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023, arXiv 2305.17333. Per step and sample:
z ~ N(0, 1) from a seed, g = (L(p + eps z) - L(p - eps z)) / (2 eps), p <- p - lr (g z + wd p).

The published code perturbs the parameters in place and back, which in 16 bits does not restore them. Here they are never
perturbed: each op of the forward gets p + eps z instead of p (`_math/perturbed.py`), so parameters keep their bits, and the
peak is the forward's and one op's parameters. `in_place=True` is the published way, for forwards that cannot be watched
(compiled ones). There is no state beyond two numbers, and a whole run is a list of (seed, g): see `last` and `replay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from holdall.errors import InvalidInput
from holdall.optim._math.per_parameter import Group, PerParameter, compute_dtype
from holdall.optim._math.perturbed import Perturbed
from holdall.optim._math.rng import generator, mix, rewound

PIECE = 1 << 20  # elements drawn at a time; part of what a seed means


@dataclass(frozen=True, kw_only=True)
class MezoProbe:
    """One random direction and the slope of the loss along it, which determine an update."""

    seed: int
    slope: float


class Mezo(PerParameter):
    """`step(closure)`: the closure returns the loss, a number or a tensor, without backward; it need not be differentiable.

    `samples`: directions averaged per step (n-SPSA). `seed`: of the whole run. `process_group`: the two losses are averaged
    over its ranks, which then make the same update. Dropout draws the same masks for both losses. Weight decay is each
    group's; the published code has none for biases and norms.
    """

    name: ClassVar[str] = "mezo"
    paper: ClassVar[str] = "Malladi et al. 2023, arXiv 2305.17333"
    exact: ClassVar[bool] = False
    forward_only: ClassVar[bool] = True  # no gradients are computed or read

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        *,
        eps: float = 1e-3,
        weight_decay: float = 0.0,
        samples: int = 1,
        seed: int = 0,
        in_place: bool = False,
        process_group: dist.ProcessGroup | None = None,
        **unknown: Any,
    ) -> None:
        if samples < 1 or not eps > 0:
            raise InvalidInput(
                f"`samples` is {samples} and `eps` is {eps}, which is out of range",
                hint="use samples >= 1 and eps > 0, such as eps=1e-3",
            )
        self._process_group = process_group
        self.last: tuple[MezoProbe, ...] = ()  # of the last step
        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "samples": samples, "seed": seed, "in_place": in_place}
        super().__init__(params, {**options, "steps": 0}, unknown)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy has the groups and states only
        self.__dict__.setdefault("_process_group", None)
        self.__dict__.setdefault("last", ())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Estimate the gradient and update; returns the mean of all evaluated losses."""
        if closure is None:
            raise InvalidInput(
                "MeZO's `step` needs a closure, since it evaluates the loss at perturbed parameters",
                hint="call `step(closure)` without any backward",
            )
        first = self.param_groups[0]
        probes, losses = [], []
        with torch.no_grad():
            for sample in range(first["samples"]):
                seed = mix(first["seed"], first["steps"], sample)
                above, below = self._losses(closure, seed, first["eps"])
                probes.append(MezoProbe(seed=seed, slope=(above - below) / (2 * first["eps"])))
                losses += [above, below]
        self.replay(probes)
        return sum(losses) / len(losses)

    @torch.no_grad()
    def replay(self, probes: Sequence[MezoProbe]) -> None:
        """Repeat the update of the step that recorded these probes."""
        for n, param, group in self._trained():
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            draws = [_pieces(n, param, probe.seed) for probe in probes]
            for value in _stretches(param):
                slope = next(draws[0]).mul_(probes[0].slope / len(probes))
                for probe, draw in zip(probes[1:], draws[1:], strict=True):
                    slope.add_(next(draw), alpha=probe.slope / len(probes))
                wide = value.to(slope.dtype)
                if decay:
                    wide.mul_(1 - lr * decay)
                wide.add_(slope, alpha=-lr)
                if wide is not value:
                    value.copy_(wide)
                del slope, wide  # before the next is drawn
        self.last = tuple(probes)
        for group in self.param_groups:
            group["steps"] += 1

    def _losses(self, closure: Callable[[], Any], seed: int, eps: float) -> tuple[float, float]:
        """The losses at +eps and -eps; the parameters are unchanged, also after an error."""
        evaluate = self._evaluate_in_place if self.param_groups[0]["in_place"] else self._evaluate
        with rewound(p.device for _, p, _ in self._trained()):
            above = evaluate(closure, seed, eps)
        below = evaluate(closure, seed, -eps)
        if self._process_group is not None:
            both = torch.tensor([above, below], dtype=torch.float64)
            dist.all_reduce(both, group=self._process_group)
            above, below = (both / dist.get_world_size(self._process_group)).tolist()
        if not math.isfinite(above) or not math.isfinite(below):
            raise InvalidInput(
                f"the losses are {above} and {below}, so the step was not made", hint="use a smaller `eps`, or another batch"
            )
        return above, below

    def _evaluate(self, closure: Callable[[], Any], seed: int, eps: float) -> float:
        def shifted(n: int, param: Tensor) -> Tensor:
            made = torch.empty_like(param)
            _shift(n, param, made, seed, eps)
            return made

        with Perturbed(((n, p) for n, p, _ in self._trained()), shifted):
            loss = closure()
        return float(loss)

    def _evaluate_in_place(self, closure: Callable[[], Any], seed: int, eps: float) -> float:
        """As published: perturb in place and back. In 16 bits the parameters drift."""
        for n, param, _ in self._trained():
            _shift(n, param, param, seed, eps)
        try:
            return float(closure())
        finally:
            for n, param, _ in self._trained():
                _shift(n, param, param, seed, -eps)

    def _trained(self) -> Iterator[tuple[int, Tensor, Group]]:
        """Trainable parameters by their index among all, so that freezing one does not change another's direction."""
        listed = ((p, group) for group in self.param_groups for p in group["params"])
        return ((n, p.detach(), group) for n, (p, group) in enumerate(listed) if p.requires_grad)

    def _bytes(self, p: Tensor, group: Group) -> int:  # noqa: ARG002
        return 0


def _stretches(param: Tensor) -> Iterator[Tensor]:
    """The elements in order, a stretch at a time; the whole where they do not lie in order."""
    if not param.is_contiguous():
        return iter([param])
    flat = param.view(-1)
    return (flat[begin : begin + PIECE] for begin in range(0, max(1, flat.numel()), PIECE))


def _pieces(n: int, param: Tensor, seed: int, room: Tensor | None = None) -> Iterator[Tensor]:
    """The direction of parameter n under this seed, stretch by stretch: each a new tensor, or the stretch's place in `room`."""
    source = generator(param.device, seed, n)
    for place in _stretches(param if room is None else room):
        if room is None:  # not bound to a name here, so that the caller holds the only reference
            yield torch.empty(place.shape, dtype=compute_dtype(param), device=param.device).normal_(generator=source)
        else:
            yield place.normal_(generator=source)


def _shift(n: int, param: Tensor, out: Tensor, seed: int, by: float) -> None:
    """out = param + by * direction, rounded once. `out` is the parameter itself, or laid out as it."""
    room = out if out.data_ptr() != param.data_ptr() and out.dtype == compute_dtype(param) else None
    draws = _pieces(n, param, seed, room)
    for value, target in zip(_stretches(param), _stretches(out), strict=True):
        z = next(draws).mul_(by).add_(value)
        if room is None:
            target.copy_(z)
        del z
