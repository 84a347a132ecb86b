"""PipeTransformer: layers freeze from the bottom, the pipeline shrinks, and freed GPUs become replicas (ICML 2021).

    freeze      `frozen_layers`: ceil(L (1 - (1 - a)^T)) after epoch T, as in the released code; `frozen_by_norms`: the
                paper's rule, which stops at the layer with the smallest gradient
    cut         `elastic_cut`: devices are filled in order; a frozen layer weighs a sixth, for it has no gradients and no states
    shrink      `shrunk`: half as many devices while no part is larger than the largest at the beginning
    epoch       `epoch_seconds`: the step of all replicas by the simulator, with the best number of micro-batches
    cache       `FrozenPrefix`: outputs of frozen layers, kept by sample

Freezing is not exact. The elastic part is: `moved_optimizer` takes states from one cut to another as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import torch

from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.cuts.layers import CutLayer
from holdall.pipelines.schedules import pipeline
from holdall.pipelines.simulator import simulate

FROZEN = 1 / 6  # weight of a frozen layer's bytes


def frozen_layers(layers: int, epoch: int, share: float = 1 / 3) -> int:
    """Frozen after so many epochs."""
    left = (1 - Fraction(share).limit_denominator(1000)) ** epoch
    return ceil(layers * (1 - left))


def frozen_by_norms(norms: Sequence[float], frozen: int, share: float = 1 / 3) -> int:
    """At most a share of what is left, and no further than the layer whose gradient is smallest."""
    most = frozen + int(share * (len(norms) - frozen))
    least = min(range(frozen, len(norms)), key=norms.__getitem__) if frozen < len(norms) else frozen
    return min(most, least)


def loads(layers: Sequence[CutLayer], frozen: int) -> list[float]:
    """Bytes that count: parameters, of frozen layers a sixth."""
    return [layer.weights * (FROZEN if n < frozen else 1) for n, layer in enumerate(layers)]


def elastic_cut(layers: Sequence[CutLayer], devices: int, frozen: int) -> tuple[int, ...]:
    """Bounds: each device takes layers while it is below the mean of what is left, and leaves one for each that follows."""
    costs = loads(layers, frozen)
    bounds = [0]
    for device in range(devices - 1):
        first = end = bounds[-1]
        left = devices - device
        mean = sum(costs[first:]) / left
        while end < len(costs) - (left - 1) and (end == first or sum(costs[first:end]) + costs[end] / 2 <= mean):
            end += 1
        bounds.append(end)
    return (*bounds, len(layers))


def _largest(layers: Sequence[CutLayer], devices: int, frozen: int) -> float:
    costs = loads(layers, frozen)
    return max(sum(costs[a:b]) for a, b in pairwise(elastic_cut(layers, devices, frozen)))


def shrunk(layers: Sequence[CutLayer], devices: int, frozen: int) -> int:
    """Devices of a pipeline that began with so many."""
    limit = _largest(layers, devices, 0)
    now = devices
    while now > 1 and now % 2 == 0 and _largest(layers, now // 2, frozen) <= limit:
        now //= 2
    return now


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticEpoch:
    frozen: int
    pipes: int  # devices of a pipeline
    replicas: int
    micro_batches: int
    seconds: float  # of a step of all replicas, simulated


def epoch_seconds(
    layers: Sequence[CutLayer], gpus: int, pipes: int, frozen: int, *, batch: int, bandwidth: float, cached: bool = False
) -> ElasticEpoch:
    """A step of `batch` samples; `layers` are for one sample. `cached`: outputs of frozen layers are read, not computed."""
    replicas = gpus // pipes
    own = batch / replicas
    bounds = elastic_cut(layers, pipes, frozen)
    active = sum(layer.weights for layer in layers[frozen:])
    reduce = 2 * (replicas - 1) / replicas * active / bandwidth / pipes
    found = []
    for count in range(pipes, 6 * pipes + 1, pipes) if pipes > 1 else (1,):
        size = own / count
        stages = []
        for first, end in pairwise(bounds):
            ahead = sum(x.forward for n, x in enumerate(layers[first:end], first) if n >= frozen or not cached)
            back = sum(x.backward for x in layers[max(first, frozen) : max(end, frozen)])
            stages.append(StageCosts(forward=size * ahead, input=size * back / 2, weight=size * back / 2))
        made = pipeline("one_f_one_b", ranks=pipes, micro_batches=count)
        slowest = max(layers[end - 1].output for end in bounds[1:]) * size / bandwidth
        found.append(
            (simulate(made, PipeCosts(stages=tuple(stages), hop=slowest if pipes > 1 else 0.0)).makespan + reduce, count)
        )
    seconds, count = min(found)
    return ElasticEpoch(frozen=frozen, pipes=pipes, replicas=replicas, micro_batches=count, seconds=seconds)


def moved_optimizer(
    olds: Iterable[torch.optim.Optimizer],
    parameters: Sequence[torch.nn.Parameter],
    make: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """An optimizer of these parameters with the states that others have of them, as they are."""
    new = make(parameters)
    states = {p: state for old in olds for p, state in old.state.items()}
    for p in parameters:
        if p in states:
            new.state[p] = states[p]
    return new


class FrozenPrefix:
    """Frozen layers, run without gradients; their outputs are kept by sample until the prefix grows."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self.layers = list(layers)
        self.kept: dict[Any, torch.Tensor] = {}
        self.computed = 0  # samples that were not in the cache

    def __call__(self, samples: Sequence[Any], inputs: torch.Tensor) -> torch.Tensor:
        missing = [n for n, sample in enumerate(samples) if sample not in self.kept]
        if missing:
            self.computed += len(missing)
            with torch.no_grad():
                x = inputs[missing]
                for layer in self.layers:
                    x = layer(x)
            for n, out in zip(missing, x, strict=True):
                self.kept[samples[n]] = out.cpu()
        return torch.stack([self.kept[sample].to(inputs.device) for sample in samples])

    def grow(self, layers: Sequence[torch.nn.Module]) -> None:
        """More frozen layers: what is kept goes through them."""
        self.layers += layers
        with torch.no_grad():
            for sample, out in self.kept.items():
                x = out[None]
                for layer in layers:
                    x = layer(x)
                self.kept[sample] = x[0]
