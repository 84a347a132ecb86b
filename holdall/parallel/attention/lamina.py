"""Attention offloading (Lamina, arXiv 2405.01814): while a model decodes, attention and its keys and values are on other
devices than everything else. For inference alone: a backward would need the keys and values again.

Attention of one new token reads a long cache once, and its time is that of memory; matrix products of a batch take computation.
So the cache goes to devices with much memory, which a query, a key and a value reach and a result leaves:

    bytes of a token = (2 + 2 / G) * element * width, for every layer; G heads of queries share one of keys and values

`OffloadedAttention` runs so on any two devices of torch. The query travels first: attention over the old cache begins, and the
new key and value are merged in by log-sum-exp when they come. The rest is simulated: `rotated` plays batches in turns over
replicas of the model and one pool for attention, `decode_rate` and `apart_rate` are tokens per second by rates and memory of
devices, with no latency and perfect overlap, which favours both.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from holdall.errors import Infeasible, InvalidInput
from holdall.parallel.attention.rings import merge, tile
from holdall.types.trace import Bytes, Seconds


class OffloadedAttention:
    """The caches of all layers on a device of their own. `sent`: bytes that have crossed, both ways."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.sent: Bytes = 0
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Attention of new tokens over the layer's cache and themselves; q, k, v: (batch, heads, 1, head width)."""
        if q.shape[-2] != 1:
            raise InvalidInput(f"{q.shape[-2]} new tokens at once, where one is decoded", hint="fill the cache with `fill`")
        by = scale if scale is not None else float(q.shape[-1] ** -0.5)
        query = self._over(q)
        old = self._caches.get(layer)
        before = None if old is None else tile(query, *old, False, by)
        key, value = self._over(k), self._over(v)
        out, lse = tile(query, key, value, False, by)
        if before is not None:
            merge(out, lse, *before)
        self.fill(layer, key, value)
        self.sent += out.nbytes
        return out.to(q.device)

    def fill(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add keys and values, such as those of a prompt; not counted."""
        k, v = k.to(self.device), v.to(self.device)
        old = self._caches.get(layer)
        self._caches[layer] = (k, v) if old is None else (torch.cat([old[0], k], -2), torch.cat([old[1], v], -2))

    def _over(self, t: torch.Tensor) -> torch.Tensor:
        self.sent += t.nbytes
        return t.to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model that decodes: parameters, layers, width, heads of queries for one of keys, bytes of an element."""

    params: int
    layers: int
    width: int
    group: int = 1
    element: int = 2

    def wire_bytes(self, batch: int) -> Bytes:
        """That cross in one token of every sequence of a batch."""
        return (2 * self.width + 2 * self.width // self.group) * self.element * batch * self.layers

    def cache_bytes(self, length: int) -> Bytes:
        """Keys and values of one sequence."""
        return 2 * self.width // self.group * self.element * self.layers * length

    def needed_rate(self, batch: int, token: Seconds, *, slowdown: float) -> float:
        """Bytes per second of a link that adds at most so much of a token's time."""
        return self.wire_bytes(batch) / (slowdown * token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Equal devices: how many, and each one's memory, bytes and operations per second, and price."""

    count: int
    memory: Bytes
    bandwidth: float
    flops: float
    price: float

    @property
    def cost(self) -> float:
        return self.count * self.price


def _model_seconds(model: Decoder, batch: float, on: Devices) -> Seconds:
    """Matrix products of one token of each sequence."""
    reads = model.params * model.element / (on.count * on.bandwidth)
    return max(reads, 2 * model.params * batch / (on.count * on.flops))


def _attention_seconds(model: Decoder, batch: float, length: int, on: Devices) -> Seconds:
    return batch * model.cache_bytes(length) / (on.count * on.bandwidth)


def decode_rate(model: Decoder, on: Devices, *, length: int) -> float:
    """Simulated tokens per second with everything on the same devices, in the largest batch that fits."""
    room = on.count * on.memory - model.params * model.element
    batch = room // model.cache_bytes(length)
    if batch < 1:
        raise Infeasible("the model and one sequence do not fit the devices", hint="use more of them")
    return batch / (_model_seconds(model, batch, on) + _attention_seconds(model, batch, length, on))


def apart_rate(model: Decoder, on: Devices, attention: Devices, *, length: int, rate: float) -> float:
    """Simulated tokens per second with attention on devices of its own; two batches take turns, so that both sides and the
    link (`rate` bytes per second) are busy at once, and the slowest decides."""
    if model.params * model.element > on.count * on.memory:
        raise Infeasible("the model does not fit its devices", hint="use more of them")
    batch = attention.count * attention.memory // model.cache_bytes(length) // 2
    if batch < 1:
        raise Infeasible("two sequences do not fit the devices for attention", hint="use more of them")
    sides = (
        _model_seconds(model, batch, on),
        _attention_seconds(model, batch, length, attention),
        model.wire_bytes(batch) / rate,
    )
    return batch / max(sides)


def rotated(batches: int, model: Seconds, attention: Seconds, *, layers: int) -> tuple[float, float]:
    """Simulated shares of time in which n - 1 replicas of a model, and one pool for attention, are busy, with n batches in
    turns: each goes from a replica that is free to the pool and back, once a layer."""
    if batches < 2:
        raise InvalidInput(f"{batches} batches take no turns", hint="use 2 or more")
    replicas = [0.0] * (batches - 1)  # when each is free
    pool = 0.0
    waiting = [(0.0, n) for n in range(batches)]  # when each batch is ready for its next layer
    left = [layers] * batches
    end = 0.0
    while waiting:
        ready, n = heappop(waiting)
        first = min(range(len(replicas)), key=replicas.__getitem__)
        replicas[first] = max(replicas[first], ready) + model
        pool = max(pool, replicas[first]) + attention
        left[n] -= 1
        end = max(end, pool)
        if left[n]:
            heappush(waiting, (pool, n))
    work = batches * layers
    return work * model / (end * len(replicas)), work * attention / end
