"""From what was typed to a plan: which machine, which trace, which options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdall.api import Budget, plan, resolve_budget
from holdall.cli._workload import Workload, describe_workload
from holdall.cost.presets import gpu
from holdall.cost.roofline import cost_trace
from holdall.errors import InvalidInput, unknown_name
from holdall.registry import member_class
from holdall.runtime.probe import probe
from holdall.simulator import simulate
from holdall.types import Hardware, Kind, Outcome, Plan, Problem, Progress, Tier, Trace
from holdall.units import TiB

_STAYS = (Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.BUFFER, Kind.INPUT)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `plan`, as typed."""

    model: str | None
    batch: int
    seq: int
    dtype: str
    optimizer: str
    budget: str
    planner: str
    allow: str | None
    options: Sequence[str]
    gpu: str | None
    hardware: Path | None
    trace: Path | None = None


def make_plan(request: Request, progress: Progress) -> Plan:
    """Validate what is cheap to validate, then find the machine, the trace and the plan."""
    options = read_options(request.planner, request.options)
    read = Trace.load(request.trace) if request.trace else None
    workload = None if read else _workload(request)
    machine = find_machine(request.gpu, request.hardware, progress, device=_device_of(read))
    budget = read_budget(request.budget)
    resolve_budget(budget, machine)  # a wrong size is said before the tracing
    if read is None:
        assert workload is not None
        progress(f"tracing {workload.source.name}", 0, 0, "")
        read = workload.trace(machine.device)
    check_device(read, machine)
    return plan(
        read,
        budget=budget,
        planner=request.planner,
        hardware=machine,
        allow=split(request.allow),
        progress=progress,
        **options,
    )


def _workload(request: Request) -> Workload:
    if request.model is None:
        raise InvalidInput("no model was named", hint="name one, as in `holdall plan gpt2`, or give a `--trace FILE`")
    return describe_workload(
        request.model, batch=request.batch, seq=request.seq, dtype=request.dtype, optimizer=request.optimizer
    )


def _device_of(trace: Trace | None) -> str:
    return "auto" if trace is None else str(trace.about.get("device", "cpu"))


def find_machine(name: str | None, path: Path | None, progress: Progress, *, device: str = "auto") -> Hardware:
    """The GPU of that name, the machine of that file, or this machine, measured."""
    if name is not None and path is not None:
        raise InvalidInput("both --gpu and --hardware were given", hint="give one of them")
    if name is not None:
        return gpu(name)
    if path is not None:
        return Hardware.load(path)
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "the trace is for a GPU, and this machine has none to measure",
            hint="name the GPU to plan for, as in `--gpu rtx-4090`, or trace again with `--device cpu`",
        )
    return probe(device, quick=True, progress=progress)


def check_device(trace: Trace, machine: Hardware) -> None:
    """A GPU runs other kernels than a CPU, so a trace of one says little about the other."""
    traced = trace.about.get("device")
    if traced != machine.device:
        raise InvalidInput(
            f"the trace is for {traced}, but {machine.name} computes on {machine.device}",
            hint=f"trace again with `--device {machine.device}`",
        )


def read_budget(text: str) -> Budget:
    """One size, or one per tier as in gpu=24GiB,cpu=64GiB."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return {tier.strip(): size.strip() for tier, _, size in pairs}


def read_options(planner: str, given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs for a planner; values are JSON where they can be read so, else text."""
    known = [field.name for field in dataclasses.fields(member_class("planners", planner))]
    options = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(f"`--option {pair}` has no value", hint="write it as `--option key=value`")
        if key not in known:
            raise unknown_name(f"option of {planner}", key, known)
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def split(text: str | None) -> list[str] | None:
    """Names between commas; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def plain_outcome(trace: Trace) -> Outcome:
    """Bytes of plain training. They do not depend on the machine's speed, so it is made up and nothing is measured."""
    home = "gpu" if trace.about.get("device") == "cuda" else "cpu"
    device = "cuda" if home == "gpu" else "cpu"
    tier = Tier(name=home, capacity=TiB, read=1e12, write=1e12)
    machine = Hardware(name="any", device=device, tiers=(tier,), flops={"float32": 1e13}, bandwidth=1e12)
    problem = Problem(trace=cost_trace(trace, machine), hardware=machine, budget={home: TiB})
    return simulate(problem, [], full=True, allocator="caching" if home == "gpu" else None)


def activation_part(outcome: Outcome) -> int:
    """Bytes at the peak that are neither model, gradients, states nor inputs: what recompute and offload can act on."""
    home = next(iter(outcome.peak))
    return outcome.peak[home] - sum(outcome.peak_kinds.get(kind, 0) for kind in _STAYS)


def budget_leaving(outcome: Outcome, fraction: float) -> int:
    """The budget that leaves this fraction of the activation part of a plain step."""
    home = next(iter(outcome.peak))
    return outcome.peak[home] - round((1 - fraction) * activation_part(outcome))
