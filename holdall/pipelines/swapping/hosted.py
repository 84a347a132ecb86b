"""Layers that rest in host memory, and the GPUs of one server that they pass over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedLayer:
    """One layer. Seconds and bytes `of a sample` grow with the micro-batch; `launch` seconds come with every call."""

    weights: int  # bytes; gradients have as many
    forward: float = 1.0  # seconds of a sample
    backward: float = 2.0  # seconds of a sample, without computing the forward again
    launch: float = 0.0
    input: int = 0  # bytes of a sample that enter the layer
    inside: int = 0  # bytes of a sample that the layer holds for its backward; counted for all layers of a pack, forward too


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedGpus:
    """Equal GPUs of one server."""

    count: int
    memory: int  # bytes of one
    host: float  # bytes per second between one and the host, each way at once
    peer: float  # bytes per second between two
    update: float = float("inf")  # bytes of weights per second that the host updates


def forward_bytes(layer: HostedLayer, samples: int) -> int:
    return layer.weights + samples * layer.inside


def backward_bytes(layer: HostedLayer, samples: int) -> int:
    return 2 * layer.weights + samples * layer.inside
