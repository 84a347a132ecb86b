"""The plan of a training run: the device and the machine that it is for, and room for the gradients that accumulate.

A trace is of one forward and backward, but with accumulation the gradients are there all the time from the second forward on. A
planner does not know of them, so it is asked again with less, until its plan and the gradients fit the budget together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from holdall import api
from holdall.errors import Infeasible, InvalidInput, Unsupported, unknown_name
from holdall.registry import member_class
from holdall.training import TrainOptions
from holdall.types import Hardware, Kind, Outcome, Plan, Progress, Trace
from holdall.units import format_bytes

_LOSSES = 1024  # bytes: the losses of the forwards before, and their shares


def resolve_device(asked: str) -> str:
    """Where the run computes, as torch names it."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = asked.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise unknown_name("device", asked, ("auto", "cpu", "cuda"))
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unsupported("no CUDA device is available here", hint="train on the CPU: `--device cpu`")
    return asked


def resolve_machine(options: TrainOptions, device: str) -> Hardware:
    """What to plan with. A wrong planner or size is said here, before anything slow."""
    member_class("planners", options.planner)
    machine = api.resolve_hardware(options.hardware, torch.device(device).type)
    if machine.device != torch.device(device).type:
        hint = "leave it out: this machine is then measured"
        raise InvalidInput(f"`{options.hardware}` computes on {machine.device}, but the run is on {device}", hint=hint)
    api.resolve_budget(options.budget, machine)
    return machine


def make_plan(options: TrainOptions, trace: Trace, machine: Hardware, progress: Progress) -> Plan:
    """The plan of every step. Where gradients accumulate, it leaves them their room."""
    progress("planning", 0, 0, "")

    def plan_for(budget: Any) -> Plan:
        return api.plan(trace, budget=budget, planner=options.planner, hardware=machine, progress=progress)

    made = plan_for(options.budget)
    return made if options.accumulate == 1 else _make_room_for_gradients(made, trace, plan_for)


def _make_room_for_gradients(made: Plan, trace: Trace, plan_for: Callable[[Any], Plan]) -> Plan:
    """A plan that fits with the gradients of the forwards before in memory; its peak says so."""
    home, limit = next(iter(made.budget.items()))
    gradients = sum(t.nbytes for t in trace.tensors.values() if t.kind is Kind.GRAD)
    why = f"accumulation keeps {format_bytes(gradients)} of gradients in memory from the second forward on"
    try:
        while (peak := _peak_with_gradients(made.predicted, gradients)) > limit:
            budget = made.predicted.peak[home] - (peak - limit)  # less than this plan takes: the next one is another
            if budget <= 0:
                raise Infeasible(f"{format_bytes(limit)} is less than the gradients need", smallest=peak)
            made = plan_for({**made.budget, home: budget})
    except Infeasible as error:
        raise Infeasible(
            f"{error.fact} ({why}, out of {format_bytes(limit)})", hint="use a larger budget or `--accumulate 1`"
        ) from error
    return replace(
        made,
        budget={**made.budget, home: limit},
        predicted=replace(made.predicted, peak={**made.predicted.peak, home: peak}),
        why=(*made.why, why),
    )


def _peak_with_gradients(outcome: Outcome, gradients: int) -> int:
    """The largest moment, with every gradient present and those just made still apart from their sums."""
    home_peak = next(iter(outcome.peak.values()))
    peak = home_peak if outcome.timeline else home_peak + gradients
    made: deque[int] = deque([0], maxlen=4)  # autograd adds a gradient once all that its node returns are computed
    for moment in outcome.timeline:
        made.append(moment.kinds.get(Kind.GRAD, 0))
        peak = max(peak, moment.total + gradients - min(made))
    return peak + _LOSSES
