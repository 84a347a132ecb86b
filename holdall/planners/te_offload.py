"""Transformer Engine's CPU offload: the first n of L layers are offloaded, by a schedule that L and n alone decide.

NVIDIA Transformer Engine, `get_cpu_offload_context(num_layers=n, model_layers=L)`. With layers counted from 0, for i < n:

- the copy of layer i to the host begins when its forward is over; its device memory is freed before layer L - n + i begins;
- its fetch begins with the backward of layer L - 1 - n + i; the last L - n layers are never moved.

So no more than L - n layers are ever on the device, in either pass: a guarantee about memory, whatever the link does. At
n = L - 1 no copy overlaps another layer; more is refused. Tensors of fewer than 256 * 1024 elements stay, as in Transformer
Engine, where they are not worth a copy of their own.

There the user picks n. Here the smallest n that fits the budget is taken, unless `layers` names one. A layer is a block that
saves tensors for backward. Not here: quantised tensors by component, and the manual mode for pipeline schedules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.actions.offload import Offload
from holdall.errors import InvalidInput
from holdall.planning.finish import finish, outcome_or_never
from holdall.planning.segments import saving
from holdall.planning.state_planners import NOTHING, missing_bytes
from holdall.types import Action, Block, Plan, Problem, Trace

_ELEMENTS = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class TeOffload:
    layers: int | None = None  # the first so many are offloaded; None: as few as fit the budget
    elements: int = _ELEMENTS  # smaller tensors stay on the device

    name: ClassVar[str] = "te_offload"
    paper: ClassVar[str] = "NVIDIA Transformer Engine, cpu_offload (2024)"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        layers = saving(problem.trace)
        tried = self._counts(problem, len(layers))
        least: tuple[int, int, Sequence[Action]] | None = None
        for done, count in enumerate(tried):
            problem.progress("trying layers to offload", done, len(tried), f"{count} of {len(layers)}")
            actions = offload_first(problem.trace, layers, count, self.elements)
            missing = missing_bytes(problem, outcome_or_never(problem, actions))
            if least is None or missing < least[0]:
                least = missing, count, actions
            if not missing:
                break
        assert least is not None
        return finish(self, problem, least[2], why=[_why(least[1], len(layers), self.elements)], began=began)

    def _counts(self, problem: Problem, layers: int) -> Sequence[int]:
        """The numbers of layers to try, fewest first."""
        if self.elements < 0:
            raise InvalidInput(f"`elements` is {self.elements}", hint="use 0 to offload tensors of any size")
        most = max(0, layers - 1)
        if self.layers is not None:
            if not 0 <= self.layers <= most:
                raise InvalidInput(
                    f"`layers` is {self.layers}, and the model has {layers} layers that save tensors",
                    hint=f"offload at most {most}: the last layer's backward follows its forward at once",
                )
            return [self.layers]
        return range(most + 1 if problem.hardware.others and problem.permits(Offload) else 1)


def offload_first(trace: Trace, layers: Sequence[Block], count: int, elements: int = 0) -> list[Action]:
    """Transformer Engine's schedule for the first `count` of these layers."""
    stay = len(layers) - count  # layers on the device at once
    actions: list[Action] = []
    for n, block in enumerate(layers[:count]):
        meets = layers[n + stay - 1]  # freed when its forward is over, fetched when its backward begins
        offload = Offload.of(trace, block, overlap=False)
        if meets is not block:
            offload = replace(offload, lag=True, until=meets.name, fetch=meets.name)
        actions.append(replace(offload, least=elements))
    return actions


def _why(count: int, layers: int, elements: int) -> str:
    if not count:
        return NOTHING
    small = f"; tensors of fewer than {elements:,} elements stay" if elements else ""
    return f"the first {count} of {layers} layers are offloaded: at most {layers - count} are on the device at once{small}"
