"""Numbers of stages and micro-batches that searches try."""

from __future__ import annotations

from holdall.pipelines.cuts.balanced import even_cut
from holdall.pipelines.hybrid.strategies import Pricing, divisors

MOST = 1024  # micro-batches that are tried


def micro_batch_counts(pricing: Pricing) -> list[int]:
    """Divisors of the batch."""
    return [n for n in divisors(pricing.model.batch) if n <= MOST]


def pipe_counts(pricing: Pricing) -> list[int]:
    """Stages of equal groups of devices."""
    most = min(len(pricing.model.layers), pricing.space.most_pipes or pricing.cluster.devices)
    return [n for n in divisors(pricing.cluster.devices) if pricing.space.least_pipes <= n <= most]


def base_seconds(pricing: Pricing) -> list[float]:
    """Layer -> seconds of a sequence on one device, to balance stages by."""
    return [sum(layer.seconds(1, 1)) for layer in pricing.model.layers]


def even_stages(pricing: Pricing, stages: int) -> tuple[int, ...]:
    """Bounds of stages of about equal time, found once."""
    if stages not in pricing.cuts:
        pricing.cuts[stages] = even_cut(base_seconds(pricing), stages)
    return pricing.cuts[stages]


def sub_meshes(devices: int, per_node: int) -> list[int]:
    """Sizes: powers of two inside a node, or whole nodes."""
    inside = [2**n for n in range(per_node.bit_length()) if 2**n < per_node]
    return [n for n in (*inside, *range(per_node, devices + 1, per_node)) if n <= devices]
