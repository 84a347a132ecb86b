"""ZeRO-Infinity: weights, gradients and optimizer states on the host or on disks, by configuration; one device.

Rajbhandari et al., SC 2021, arXiv 2104.07857 (DeepSpeed's ZeRO-3 with offload). Like DeepSpeed's, a fixed rule with knobs that
are counted in elements; it does not look at the budget:

- `tier` holds what leaves the device: "host" (the nearest), or a tier such as "nvme";
- a unit is fetched for its forward and for its backward, and released after each, unless all of its parameters are smaller than
  `persistence_threshold`: those stay;
- units are fetched ahead while they fit into `prefetch_bucket` and, with the one in use, into `max_live`;
- every block is recomputed from its input, which may wait on the host too (`offload_checkpoints`);
- the host updates after backward, when the norm is known; nothing overlaps backward. States on a disk are updated a `sub_group`
  at a time, while the next one is read and the one before is written.

`efficiency` and what follows it are the paper's model of which bandwidth each kind of state needs.

Not here: shards over ranks and their gathering, tiles of linear layers. A trace says in which order units are needed, so there
is no step to record it; a step in another order is right, without fetching ahead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.place import Place, streamable
from holdall.cost.link import link_rate
from holdall.errors import InvalidInput
from holdall.planners.l2l import layers
from holdall.planning.finish import finish
from holdall.planning.state_planners import movable, place_in_tier, places_states
from holdall.types import Action, Phase, Plan, Problem, Trace, Unit


@dataclass(frozen=True, kw_only=True)
class ZeroInfinity:
    tier: str = "host"  # of weights, gradients and states: "host", or a tier beyond it such as "nvme"
    persistence_threshold: int = 100_000  # elements; units of smaller parameters stay on the device
    prefetch_bucket: int = 50_000_000  # elements that are fetched ahead
    max_live: int = 1_000_000_000  # elements of streamed weights on the device
    recompute: bool = True  # every block
    offload_checkpoints: bool = False  # inputs of blocks wait on the host
    sub_group: int = 1_000_000_000  # elements of states in a tier beyond the host that are updated at a time
    pipeline_read: bool = True  # the next sub-group is read while one is updated
    pipeline_write: bool = True  # the one before is written meanwhile

    name: ClassVar[str] = "zero_infinity"
    paper: ClassVar[str] = "Rajbhandari et al., SC 2021, arXiv 2104.07857"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        self._check()
        actions: list[Action] = layers(problem, self.offload_checkpoints) if self.recompute else []
        why = [f"{len(actions)} actions on blocks: every one runs again from its input"] if actions else []
        if places_states(problem):
            place = self._place(problem)
            actions = [place, *actions]
            why += self._why(problem, place)
        return finish(self, problem, actions, why=why, began=began)

    def _check(self) -> None:
        for name, least in (("persistence_threshold", 0), ("prefetch_bucket", 0), ("max_live", 0), ("sub_group", 1)):
            if getattr(self, name) < least:
                raise InvalidInput(f"`{name}` is {getattr(self, name)} elements", hint=f"use {least} or more")
        if self.offload_checkpoints and not self.recompute:
            raise InvalidInput(
                "without `recompute` there are no checkpoints to offload", hint="leave `offload_checkpoints` out"
            )

    def _place(self, problem: Problem) -> Place:
        trace = problem.trace
        can = streamable(trace)
        away = [u for u in movable(trace) if u.name in can and not self._persists(trace, u)]
        rows = {u.name: ("resident", "host") for u in movable(trace)}
        rows.update({u.name: ("streamed", "host") for u in away})
        ahead = fetched_ahead([_elements(trace, u) for u in away], self.prefetch_bucket, self.max_live)
        overlap = problem.hardware.overlap and ahead > 0
        share = problem.accumulate == 1
        place = Place.of(trace, rows, when="step", share=share, overlap=overlap, prefetch=max(1, ahead))
        tier = "" if self.tier == "host" else self.tier
        buffers = 1 + self.pipeline_read + self.pipeline_write
        return place_in_tier(place, problem, tier, stretch=4 * self.sub_group, buffers=buffers)

    def _persists(self, trace: Trace, unit: Unit) -> bool:
        return all(math.prod(trace.tensors[x].shape) < self.persistence_threshold for x in unit.weights)

    def _why(self, problem: Problem, place: Place) -> list[str]:
        streamed = {unit for unit, weights, _ in place.units if weights == "streamed"}
        sizes = [sum(problem.trace.tensors[x].nbytes for x in u.weights) for u in problem.trace.units if u.name in streamed]
        ahead = place.prefetch if place.overlap else 0
        found = [f"{len(streamed)} units are fetched, {ahead} ahead; {len(place.units) - len(streamed)} persist; when: step"]
        forward = sum(op.seconds for op in problem.trace.ops if op.site.phase is not Phase.STEP)
        if sizes and forward:
            tier = problem.other("" if self.tier == "host" else self.tier)
            moved = 3 * sum(sizes) / link_rate(problem.hardware, tier, problem.home)  # in, in again, gradients out
            found.append(f"efficiency without overlap: {forward / (forward + moved):.0%} of the device")
        return found


def _elements(trace: Trace, unit: Unit) -> int:
    return sum(math.prod(trace.tensors[x].shape) for x in unit.weights)


def fetched_ahead(sizes: Sequence[int], bucket: int, live: int) -> int:
    """How many units may be on their way beside the one in use, wherever that is. 0: not even one."""
    found = 0
    for count in range(1, len(sizes)):
        windows = [sizes[i : i + count + 1] for i in range(len(sizes) - count)]
        there = [*windows, *(w[::-1] for w in windows)]  # backward goes the other way
        if any(sum(w[1:]) > bucket or sum(w) > live for w in there):
            break
        found = count
    return found


# the paper's requirements (section 3) and its bandwidths (section 4)


def model_state_bytes(layers: int, hidden: int) -> int:
    """20 bytes for each of 12 layers hidden^2 parameters: mixed-precision Adam."""
    return 240 * layers * hidden**2


def checkpoint_bytes(layers: int, hidden: int, tokens: int, blocks_per_checkpoint: int = 1) -> float:
    return 2 * tokens * hidden * layers / blocks_per_checkpoint


def working_bytes(hidden: int) -> int:
    """Weight and gradient of the largest operator, hidden to 4 hidden."""
    return 4 * hidden * 4 * hidden


def activation_working_bytes(hidden: int, heads: int, tokens: int, length: int, blocks_per_checkpoint: int = 1) -> int:
    return tokens * blocks_per_checkpoint * (16 * hidden + 2 * heads * length)


def intensity_of_weights(tokens: int) -> float:
    """FLOPs for every byte of weights and gradients that moves."""
    return float(tokens)


def intensity_of_states(tokens: int) -> float:
    """For every byte of optimizer states."""
    return tokens / 4


def intensity_of_checkpoints(hidden: int, blocks_per_checkpoint: int = 1) -> float:
    return 24.0 * hidden * blocks_per_checkpoint


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """The share of its peak that a device reaches where copies do not overlap computation."""
    return intensity * bandwidth / (intensity * bandwidth + peak)
