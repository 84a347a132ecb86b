"""What a model's layers take: seconds of their ops by batch and tensor ranks, bytes of parameters and activations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Ops alike of one layer, each bound by its arithmetic, by its bytes, or by its launch."""

    count: int = 1
    arithmetic: float = 0.0  # seconds a sequence
    moving: float = 0.0  # seconds a sequence
    weights: float = 0.0  # seconds of reading parameters, for any batch
    least: float = 0.0  # seconds of an op, however small
    divided: bool = True  # tensor ranks share it; else each of them does it whole

    def seconds(self, batch: float, tensor: int) -> float:
        parts = tensor if self.divided else 1
        return self.count * max(self.least, batch * self.arithmetic / parts, (batch * self.moving + self.weights) / parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridLayer:
    """One layer of a model, for one sequence unless it says otherwise."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    parameters: int = 0
    output: int = 0  # bytes that it hands on
    activations: int = 0  # bytes held for backward, on one rank
    divided: int = 0  # those of them that tensor ranks share
    working: int = 0  # bytes that it needs for a while in its own backward
    launch: tuple[float, float] = (0.0, 0.0)  # seconds in which a host launches its forward and its backward, for any batch
    reduces: int = 2  # all-reduces of `output` bytes over tensor ranks, in forward and again in backward
    most_tensor: int = 1  # tensor ranks divide this number; 1: the layer is not divided

    def seconds(self, batch: float, tensor: int) -> tuple[float, float]:
        """Of forward and backward: computing, or launching where that takes longer."""
        ahead, back = (sum(work.seconds(batch, tensor) for work in works) for works in (self.forward, self.backward))
        return max(ahead, self.launch[0]), max(back, self.launch[1])

    def held(self, tensor: int) -> float:
        """Bytes of activations of one sequence on each of the tensor ranks."""
        return self.activations - self.divided + self.divided / tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of a parameter. Defaults: bf16 to compute with, float32 shards, gradients and AdamW's states."""

    held: int = 12  # of the parameter and the optimizer's states
    gradient: int = 4
    copy: int = 2  # of what modules compute with


@dataclass(frozen=True, kw_only=True)
class HybridModel:
    """Layers in order, and the sequences of one step over all devices."""

    layers: tuple[HybridLayer, ...]
    batch: int
    states: StateBytes = StateBytes()
    update: float = 0.0  # seconds of a parameter's update
    moving: float = 0.0  # seconds of a byte that a device reads or writes, for copies around collectives

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Layer -> its kind: layers alike have the same."""
        seen: dict[HybridLayer, int] = {}
        return tuple(seen.setdefault(layer, len(seen)) for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)
