"""SuperOffload: the host updates while backward runs, before the norm is known, and takes back what turns out to be wrong.

SuperOffload, ASPLOS 2026 (DeepSpeed's `super_offload`). Three decisions of it are here:

- **Speculation, then validation.** The host's Adam begins as a unit's gradients arrive. If the step is then clipped or skipped,
  the update is undone and made again. The published code inverts Adam's formulas, which loses bits; here new values are written
  beside the old ones (`Place.ahead`), so that undoing is exact. Without 16-bit weights, or on a machine without overlap, the
  host begins after the step. If the loop never reads gradients, there is nothing to validate, and updates are made in backward.
- **The tail stays.** Units whose gradients come last (the first ones) are updated on the device, because nothing would hide the
  host's work on them. How many is the argmin of the simulated step, each count simulated whole.
- **Weights stay or flow.** They stay on the device where that fits; else those that the host updates are streamed.

Not here: casts on the device with float32 on the link (gradients and weights travel in the model's precision; the paper's own
choice for PCIe), its SVE kernel, several ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.actions.place import Place, streamable
from holdall.errors import InvalidInput
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.planning.state_planners import NOTHING, missing_bytes, movable, places_states, treatments, update_moment
from holdall.types import Action, Plan, Problem


@dataclass(frozen=True, kw_only=True)
class SuperOffload:
    ratio: float | None = None  # of the parameters that the host updates; None: what gives the shortest simulated step
    recompute: bool | None = None  # every block, or none; None: every block where nothing fits without

    name: ClassVar[str] = "superoffload"
    paper: ClassVar[str] = "SuperOffload, ASPLOS 2026; DeepSpeed"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise InvalidInput(f"`ratio` is {self.ratio}", hint="use a share from 0 to 1")
        if not self.recompute and self.ratio is None and not over_budget(problem, outcome_or_never(problem, [])):
            return finish(self, problem, [], why=[NOTHING], began=began)
        tried: list[tuple[int, float, list[Action], str]] = []
        for blocks in treatments(problem, self.recompute):
            for flows in (False, True) if places_states(problem) else (False,):
                tried += self._try(problem, blocks, flows=flows)
                if tried[-1][0] == 0:
                    return finish(self, problem, tried[-1][2], why=[tried[-1][3]], began=began)
        _, _, actions, why = min(tried, key=lambda t: t[:2])
        return finish(self, problem, actions, why=[why], began=began)

    def _try(self, problem: Problem, blocks: Sequence[Action], *, flows: bool) -> list[tuple[int, float, list[Action], str]]:
        """The best tail with weights that stay or flow: bytes missing, seconds, actions, why."""
        if not places_states(problem):
            actions = list(blocks)
            return [(missing_bytes(problem, outcome_or_never(problem, actions)), 0.0, actions, "no state may be placed")]
        found = []
        for tail in self._tails(problem):
            actions = [*blocks, place_tail(problem, tail, flows=flows)]
            missing, seconds = judged(problem, actions)
            units = len(movable(problem.trace))
            why = f"the first {tail} of {units} units are updated here, the others by the host as gradients come"
            found.append((missing, seconds, actions, why + (", with weights that flow" if flows else "")))
        return [min(found, key=lambda t: t[:2])]

    def _tails(self, problem: Problem) -> Sequence[int]:
        units = movable(problem.trace)
        if self.ratio is None:
            return range(len(units) + 1)
        kept = (1 - self.ratio) * sum(u.numel for u in units)
        sums = [sum(u.numel for u in units[:n]) for n in range(len(units) + 1)]
        return [min(range(len(sums)), key=lambda n: abs(sums[n] - kept))]


def judged(problem: Problem, actions: Sequence[Action]) -> tuple[int, float]:
    """(bytes that are missing, seconds of a step whose speculation is right)."""
    outcome = outcome_or_never(replace(problem, clipped=False), actions)
    return missing_bytes(problem, outcome), outcome.seconds


def place_tail(problem: Problem, tail: int, *, flows: bool) -> Place:
    """The first `tail` units stay for their update; the host updates the others, whose weights stay or flow."""
    trace = problem.trace
    can = streamable(trace) if flows else set()
    is_narrow = trace.about.precision is not None
    rows = {}
    for n, unit in enumerate(movable(trace)):
        if n >= tail or (is_narrow and not unit.numel):
            rows[unit.name] = ("streamed" if unit.name in can and n >= tail else "resident", "host")
    when = update_moment(problem)
    ahead = when == "overlap_forward" and is_narrow and problem.accumulate == 1
    return Place.of(trace, rows, when=when, share=problem.accumulate == 1, ahead=ahead)
