"""Ways to divide a layer over a group of devices, and what the layer then takes.

    tensor ranks     share the layer's products (Megatron's columns and rows): all-reduces of its output, in both passes; they
                     stay inside a node
    data ranks       share the batch; states are replicated, or cut:
        ddp          everything on every rank, one all-reduce of the gradients in a step
        zero2        parameters are gathered once in a step, gradients scattered after every micro-batch
        zero3        parameters are gathered in both passes of every micro-batch, gradients scattered after each
    recompute        only the layer's input is held; forward runs again in backward

Collectives over data ranks (`cost/collectives.py`: rings, hierarchical over nodes) overlap backward; those of forward, and all
over tensor ranks, do not, as in the steps that `parallel/sharding/by_rule.py` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from holdall.cost.collectives import collective_seconds
from holdall.pipelines.hybrid.layers import HybridModel
from holdall.pipelines.meshes import Cluster
from holdall.types.mesh import MeshDim

DDP, ZERO2, ZERO3 = "ddp", "zero2", "zero3"


class Strategy(NamedTuple):
    """How the devices of a stage share one layer."""

    tensor: int = 1
    data: int = 1
    way: str = DDP
    recompute: bool = False

    def __str__(self) -> str:
        parts = [f"tp {self.tensor}"] * (self.tensor > 1) + [f"{self.way} {self.data}"] * (self.data > 1)
        return " x ".join(parts or ["one device"]) + (", recomputed" if self.recompute else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What searches may use."""

    ways: tuple[str, ...] = (DDP, ZERO2, ZERO3)
    recompute: tuple[bool, ...] = (False, True)
    most_tensor: int | None = None  # None: as many as a node has
    most_pipes: int | None = None
    least_pipes: int = 1  # of `galvatron`, and of what `auto` ranks

    def strategies(self, devices: int, cluster: Cluster) -> tuple[Strategy, ...]:
        """For a group of so many devices."""
        most = min(cluster.per_node, self.most_tensor or cluster.per_node)
        found = []
        for tensor in divisors(devices):
            if tensor <= most and cluster.per_node % tensor == 0:
                ways = self.ways if devices > tensor else (DDP,)
                found += [Strategy(tensor, devices // tensor, w, r) for w, r in product(ways, self.recompute)]
        return tuple(found)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


class LayerCost(NamedTuple):
    """Of one layer on every device of its group, for one micro-batch where it says nothing else."""

    forward: float
    backward: float
    weight: float  # seconds of the gradients of weights, a part of `backward`
    lead: float  # seconds of a collective before the step's first forward
    tail: float  # seconds of one after its last backward
    update: float
    states: float  # bytes
    held: float  # bytes
    extra: float  # bytes, for a while

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def once(self) -> float:
        """Seconds of a step besides those of its micro-batches, where a sum hides behind the layer's own backward."""
        return self.lead + self.update + max(0.0, self.tail - self.backward)


class Pricing:
    """Prices of a model's layers on a cluster, each computed once."""

    def __init__(self, model: HybridModel, cluster: Cluster, space: SearchSpace | None = None) -> None:
        self.model, self.cluster, self.space = model, cluster, space or SearchSpace()
        self._costs: dict[tuple[int, Strategy, int], LayerCost | None] = {}
        self._strategies: dict[int, tuple[Strategy, ...]] = {}
        self.cuts: dict[int, tuple[int, ...]] = {}  # stages -> bounds of about equal time, as searches find them
        first = {kind: n for n, kind in reversed(list(enumerate(model.kinds)))}
        self._layer = {kind: model.layers[n] for kind, n in first.items()}

    def strategies(self, devices: int) -> tuple[Strategy, ...]:
        if devices not in self._strategies:
            self._strategies[devices] = self.space.strategies(devices, self.cluster)
        return self._strategies[devices]

    def cost(self, layer: int, strategy: Strategy, size: int) -> LayerCost | None:
        """Of a layer by its number, for micro-batches of `size` sequences over the data ranks; None: it is not divided so."""
        key = (self.model.kinds[layer], strategy, size)
        if key not in self._costs:
            self._costs[key] = self._priced(*key)
        return self._costs[key]

    def _priced(self, kind: int, strategy: Strategy, size: int) -> LayerCost | None:
        tensor, data, way, recompute = strategy
        layer, states = self._layer[kind], self.model.states
        if size % data or (tensor > 1 and layer.most_tensor > 1 and layer.most_tensor % tensor):
            return None
        parts = tensor if layer.most_tensor > 1 else 1  # a layer that is not divided is repeated on all tensor ranks
        batch = size // data
        summed = layer.reduces * self._collective("all_reduce", layer.output * batch, parts, 1) if parts > 1 else 0.0
        ahead, back = layer.seconds(batch, parts)
        ahead += summed
        weight = back / 2
        back += summed + (ahead if recompute else 0.0)
        own = layer.parameters / parts
        gather = self._collective("all_gather", states.copy * own, data, tensor)
        scatter = self._collective("reduce_scatter", states.gradient * own, data, tensor)
        out, into = (2 * nbytes * own * self.model.moving if data > 1 else 0.0 for nbytes in (states.copy, states.gradient))
        cut = 1 if way == DDP else data
        kept, lead, tail, once = (states.held + states.gradient) * own / cut, 0.0, 0.0, 0.0
        if way == DDP:
            lead, tail = out, self._collective("all_reduce", states.gradient * own, data, tensor)
        elif way == ZERO2:
            lead, back = gather + out, max(back + into, scatter)
            once = states.gradient * own
        else:
            ahead, back = ahead + gather + out, max(back + into + out, gather + scatter)
            once = (states.gradient + 2 * states.copy) * own
        kept += states.copy * own if way != ZERO3 else 0.0
        full = layer.held(parts) * batch
        return LayerCost(
            forward=ahead,
            backward=back,
            weight=min(weight, back),
            lead=lead,
            tail=tail,
            update=self.model.update * own / cut + (into if way == DDP else 0.0),
            states=kept,
            held=layer.output * batch if recompute else full,
            extra=once + layer.working * batch / parts + (full if recompute else 0.0),
        )

    def _collective(self, kind: str, nbytes: float, ranks: int, stride: int) -> float:
        """Over ranks that lie `stride` devices apart."""
        if ranks == 1:
            return 0.0
        return collective_seconds(kind, int(nbytes), self._dims(ranks, stride))

    def _dims(self, ranks: int, stride: int) -> list[MeshDim]:
        near = max(1, self.cluster.per_node // stride)
        inside = next(n for n in range(min(near, ranks), 0, -1) if ranks % n == 0)
        found = [(ranks // inside, self.cluster.between), (inside, self.cluster.inside)]
        return [MeshDim(name=network.name, size=n, network=network) for n, network in found if n > 1]

    def relayout(self, layer: int, before: Strategy, after: Strategy, size: int) -> float:
        """Seconds between a layer and the next where these divide the batch differently: a gather, in one of the passes."""
        if before.data == after.data:
            return 0.0
        few, many = sorted((before.data, after.data))
        nbytes = self.model.layers[layer].output * size / few
        return self._collective("all_gather", nbytes, many // few, min(before.tensor, after.tensor))

    def hop(self, nbytes: float) -> float:
        """Seconds of a message between stages."""
        network = self.cluster.inside if self.cluster.devices <= self.cluster.per_node else self.cluster.between
        return network.latency + nbytes / network.rate
