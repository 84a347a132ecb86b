"""L2L: the model lives on the host; a layer at a time is on the device, the next one on its way.

Pudipeddi et al. 2020, arXiv 2002.05645 ("constant memory"). A fixed rule, which does not look at the budget but for the stash:

- weights of a layer are loaded for its forward and again for its backward, into one of two slots, and dropped after it;
- only the inputs of layers are kept ("stashed"), on the device or, for memory that does not grow with depth, on the host;
  backward runs every layer again;
- the eager parameter server: the host updates a layer as soon as its gradients are there (`reads_gradients=False`), else beside
  the next forward, which waits for each layer's own update. Plain L2L (`eager=False`) updates after backward.

Embedding and head are layers too where one block alone uses them; what several use stays, updated by the host.

The paper also orders a step with several micro-batches by layers. That order is not a placement but another loop:
`holdall.training.layer_major.LayerMajor`. `seconds` is the paper's comparison of both orders. Not here: several workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.offload import Offload, replayed
from holdall.actions.place import Place, streamable
from holdall.errors import InvalidInput
from holdall.planners.chen import held_bytes
from holdall.planners.stronghold import Times
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.planning.segments import runs
from holdall.planning.state_planners import movable, places_states, treatments, update_moment
from holdall.types import Action, Plan, Problem

SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class LayerToLayer:
    stash: str | None = None  # where inputs of layers wait: "device" or "host"; None: on the device if that fits
    eager: bool = True  # the host updates as gradients come, where the loop permits; else after backward

    name: ClassVar[str] = "l2l"
    paper: ClassVar[str] = "Pudipeddi et al. 2020, arXiv 2002.05645"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.stash not in (None, "device", "host"):
            raise InvalidInput(f"`stash` is {self.stash!r}", hint='use "device" or "host"')
        place = [place_layers(problem, eager=self.eager)] if places_states(problem) else []
        can_leave = problem.permits(Offload) and problem.hardware.far is not None
        asked = [self.stash] if self.stash else ["device", *(["host"] if can_leave else [])]
        candidates = [[*place, *layers(problem, stash == "host")] for stash in asked]
        fits = (n for n, c in enumerate(candidates) if not over_budget(problem, outcome_or_never(problem, c)))
        chosen = next(fits, len(candidates) - 1)
        return finish(self, problem, candidates[chosen], why=_why(problem, place, asked[chosen]), began=began)


def layers(problem: Problem, on_host: bool) -> list[Action]:
    """Every block runs again in backward, from inputs that wait here or on the host."""
    if not on_host:
        return treatments(problem, recompute=True)[0]
    trace = problem.trace
    choice = replayed(late=problem.hardware.overlap)
    blocks = [b for row in runs(trace) for b in row if held_bytes(trace, b)]
    return [action for block in blocks for action in choice.on(trace, block)]


def place_layers(problem: Problem, *, eager: bool) -> Place:
    trace = problem.trace
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in movable(trace)}
    when = update_moment(problem) if eager else "step"
    overlap = problem.hardware.overlap
    return Place.of(trace, rows, when=when, share=problem.accumulate == 1, overlap=overlap, prefetch=SLOTS - 1)


def _why(problem: Problem, place: Sequence[Place], stash: str) -> list[str]:
    found = [f"inputs of layers wait on the {stash}, and every layer is run again in backward"]
    for placed in place:
        count = sum(weights == "streamed" for _, weights, _ in placed.units)
        found.append(f"{count} layers are loaded twice in a step, {SLOTS} are on the device; when: {placed.when}")
    if problem.accumulate > 1:
        found.append(
            f"{problem.accumulate} micro-batches load them {2 * problem.accumulate} times; "
            "`holdall.training.layer_major.LayerMajor` loads them twice"
        )
    return found


def seconds(times: Times, micro_batches: int, *, layer_major: bool) -> float:
    """Seconds of a step's forward and backward with two slots of weights: all micro-batches through a layer, or one by one."""
    forward, backward, load = list(times.forward), list(times.backward)[::-1], list(times.load)
    loads = [*load, *load[::-1]]
    if layer_major:
        return _pipelined([micro_batches * c for c in (*forward, *backward)], loads)
    return _pipelined([*forward, *backward] * micro_batches, loads * micro_batches)


def hiding(times: Times) -> int:
    """The smallest number of micro-batches at which layer-major order waits for no load but the first.

    A load has the time of the layer before it; where backward begins, that of the same layer's forward.
    """
    computes = [*times.forward, *times.backward[::-1]]
    loads = [*times.load, *times.load[::-1]][1:]
    return max((-int(-load // compute) for compute, load in zip(computes, loads, strict=False)), default=1) or 1


def _pipelined(computes: Sequence[float], loads: Sequence[float]) -> float:
    """A load begins when the one before is over and a slot is free; a computation when its load and the one before are over."""
    link = now = 0.0
    ends: list[float] = []
    for j, (compute, load) in enumerate(zip(computes, loads, strict=True)):
        link = max(link, ends[j - SLOTS] if j >= SLOTS else 0.0) + load
        now = max(now, link) + compute
        ends.append(now)
    return now
