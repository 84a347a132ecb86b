"""What of MoESys (arXiv 2205.10034) is simulated here, not run: seconds of prefetching on two lanes, of a ring of slots in
inference, and of ranks given to tasks by their load.

    2D prefetch    while a layer computes, the next layer's dense weights come over the network and its experts over the host's
                   link; each lane serves one layer after the other
    ring memory    layer l + K is loaded into the place of layer l as soon as that has computed: K places for any depth
    elastic        tasks of unequal load get ranks so that the slowest is as fast as it can be
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.errors import InvalidInput
from holdall.types.trace import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayer:
    """Seconds of a layer: its computation, its dense weights' gather, and its experts' way to the device."""

    compute: Seconds
    gather: Seconds = 0.0
    fetch: Seconds = 0.0


def prefetched_seconds(layers: Sequence[SparseLayer], *, ahead: int = 1, lanes: int = 2) -> Seconds:
    """Simulated seconds of all layers. `ahead`: layers whose weights may be on their way or there before they are needed; 0:
    nothing overlaps. `lanes=1`: gathers and fetches wait for each other."""
    if ahead < 0 or lanes not in (1, 2):
        raise InvalidInput(f"{ahead} layers ahead on {lanes} lanes", hint="use 0 or more, and 1 or 2")
    computed = [0.0]  # when each layer has, after a beginning
    network = link = 0.0
    for n, layer in enumerate(layers):
        room = computed[max(0, n - ahead)]  # the layer `ahead` before this one begins then
        network = max(network, room) + layer.gather
        link = max(link if lanes == 2 else network, room) + layer.fetch
        if lanes == 1:
            network = link
        computed.append(max(computed[-1], network, link) + layer.compute)
    return computed[-1]


def ring_seconds(computes: Sequence[Seconds], loads: Sequence[Seconds], *, slots: int) -> Seconds:
    """Simulated seconds of an inference whose layers are loaded, one after the other, into a ring of slots."""
    if slots < 1 or len(computes) != len(loads):
        raise InvalidInput(f"{len(computes)} layers with {len(loads)} loads in {slots} slots", hint="one load per layer")
    loaded, done = 0.0, [0.0]
    for n, (compute, load) in enumerate(zip(computes, loads, strict=True)):
        free = done[n - slots + 1] if n >= slots else 0.0
        loaded = max(loaded, free) + load
        done.append(max(done[-1], loaded) + compute)
    return done[-1]


def elastic_ranks(loads: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Ranks for each task so that the largest load of a rank is smallest: one each, and the next always to the slowest."""
    if not loads or ranks < len(loads) or min(loads) < 0:
        raise InvalidInput(f"{ranks} ranks for {len(loads)} tasks", hint="every task needs one")
    given = [1] * len(loads)
    for _ in range(ranks - len(loads)):
        slowest = max(range(len(loads)), key=lambda n: loads[n] / given[n])
        given[slowest] += 1
    return tuple(given)
