"""ZeRO-Offload: weights stay, gradients leave as they come, masters, optimizer states and the update live on the host.

Ren et al., USENIX ATC 2021 (arXiv 2101.06840). Of all ways to cut the data flow of a mixed-precision step that move the update
off the device, this one leaves the least there (2P of 16P bytes) at the least traffic (2P down, 2P up): a fixed rule, so it
does not look at the budget. Everything begins after backward as in the paper: clipping, Adam, and the new weights back unit by
unit. One device: the paper's sharding over ranks is not here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.delay import Delay
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.chen import held_bytes
from holdall.planning.finish import finish
from holdall.planning.segments import runs
from holdall.types import Action, Plan, Problem, Trace
from holdall.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ZeroOffload:
    recompute: bool = True  # every block, as it is run in practice
    overlap: bool = False  # updates go on beside the next forward; in the paper the device waits for them
    delayed: bool = False  # the paper's delayed parameter update: gradients take effect one step late, so it is not exact
    warmup: int = 40  # steps before the delay begins

    name: ClassVar[str] = "zero_offload"
    paper: ClassVar[str] = "Ren et al., USENIX ATC 2021, arXiv 2101.06840"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        self._check(problem)
        actions: list[Action] = []
        why = []
        place = place_states(problem.trace, when="overlap_forward" if self.overlap else "step")
        if place is not None:
            actions.append(place)
            why.append(_reason(problem.trace, place))
            if self.delayed:
                actions.append(Delay(warmup=self.warmup))
                why.append(f"after {self.warmup} steps gradients take effect one step late, beside which the next step runs")
        if self.recompute:
            blocks = [b for row in runs(problem.trace) for b in row if held_bytes(problem.trace, b)]
            actions += [Recompute.of(problem.trace, [b]) for b in blocks]
            why.append(f"{len(blocks)} blocks are recomputed, each from its input")
        return finish(self, problem, actions, why=why, began=began)

    def _check(self, problem: Problem) -> None:
        needed = {Place.name, Recompute.name} if self.recompute else {Place.name}
        if not needed <= problem.allow:
            missing = ", ".join(sorted(needed - problem.allow))
            raise Unsupported(f"zero_offload may not use {missing}", hint="allow it, or use another planner")
        if self.delayed and self.overlap:
            raise InvalidInput("a delayed update is beside the whole next step already", hint="leave `overlap` out")
        if self.warmup < 0:
            raise InvalidInput(f"`warmup` is {self.warmup} steps", hint="use 0 or more")


def place_states(trace: Trace, *, when: str) -> Place | None:
    """Every trained unit on the host, and frozen ones that are narrower here than there. None: there is no such unit."""
    is_narrow = trace.about.precision is not None
    rows = {u.name: ("resident", "host") for u in trace.units if u.numel or is_narrow}
    return Place.of(trace, rows, when=when) if rows else None


def _reason(trace: Trace, place: Place) -> str:
    away = {name for name, _, update in place.units if update == "host"}
    units = [u for u in trace.units if u.name in away]
    stay = sum(trace.tensors[x].nbytes for u in units for x in u.weights)
    leave = sum(trace.tensors[x].nbytes for u in units for x in u.states)
    return f"{len(units)} units keep {format_bytes(stay)} of weights here; {format_bytes(leave)} of states are on the host"
