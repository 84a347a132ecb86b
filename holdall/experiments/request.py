"""From command-line arguments to a plan: the machine, the trace and the planner's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdall.api import plan
from holdall.cli._errors import first_line
from holdall.cost.roofline import cost_trace
from holdall.errors import HoldallError, Infeasible, InvalidInput, MissingExtra, Unsupported, unknown_name
from holdall.experiments.workload import Workload, describe_workload
from holdall.fitting.head import fewest_rows, has_room_for_outputs, least_of
from holdall.machine.more_tiers import with_tiers
from holdall.machine.presets import gpu, gpu_names
from holdall.machine.probe import probed
from holdall.planning.finish import allocator_of
from holdall.problem import Budget, resolve_budget, resolve_layout
from holdall.registry import build_member, member_class, read_value
from holdall.simulator import simulate
from holdall.types import Hardware, Kind, Outcome, Plan, Problem, Progress, Tier, Trace
from holdall.units import TiB

_STAYS = (Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.BUFFER, Kind.INPUT)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `plan`, as typed. Either `model` or `trace` is set."""

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
    autocast: str | None = None
    precision: str | None = None
    layout: str | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything that a planner is given."""

    planner: str
    options: dict[str, Any]
    machine: Hardware
    trace: Trace
    budget: dict[str, int]
    allow: list[str] | None
    layout: str | None = None
    workload: Workload | None = None  # None: the trace was read from a file

    def plan(self, progress: Progress) -> Plan:
        """Let the planner decide; raises `Infeasible` if nothing fits."""
        return plan(
            self.trace,
            budget=self.budget,
            planner=self.planner,
            hardware=self.machine,
            allow=self.allow,
            layout=self.layout,
            progress=progress,
            **self.options,
        )


def planned(prepared: PreparedRun, progress: Progress) -> tuple[PreparedRun, Plan]:
    """The plan, and what it was made for. As by `fit`, the vocabulary head is computed in chunks where nothing fits, or where
    there is no room for outputs that a loop keeps."""
    try:
        made = prepared.plan(progress)
    except Infeasible as error:
        smaller = _with_chunked_head(prepared, progress)
        if smaller is None:
            raise
        with least_of(error):
            return smaller, smaller.plan(progress)
    if not has_room_for_outputs(made, prepared.trace):
        smaller = _with_chunked_head(prepared, progress)
        with suppress(Infeasible):
            return (prepared, made) if smaller is None else (smaller, smaller.plan(progress))
    return prepared, made


def _with_chunked_head(prepared: PreparedRun, progress: Progress) -> PreparedRun | None:
    """The same with the vocabulary head in small chunks; None: that is not possible, or takes no less."""
    workload = prepared.workload
    rows = None if workload is None else fewest_rows(workload.build()[0], workload.sample(), "auto", prepared.allow)
    if workload is None or rows is None:
        return None
    progress("little room: tracing with the vocabulary head in chunks", 0, 0, "")
    try:
        return dataclasses.replace(prepared, trace=workload.trace(prepared.machine.device, rows))
    except Unsupported:  # the recipe has a head of its own
        return None


def prepare(request: Request, progress: Progress) -> PreparedRun:
    """Find the machine and the trace; cheap checks come before anything slow."""
    options = read_options(request.planner, request.options)
    resolve_layout(request.layout)
    read = Trace.load(request.trace) if request.trace else None
    workload = _workload(request) if read is None else None
    sizes = read_budget(request.budget)
    machine = find_machine(request.gpu, request.hardware, progress, device=_device_of(read), budget=sizes)
    budget = resolve_budget(sizes, machine)
    if read is None:
        assert workload is not None
        progress(f"tracing {workload.source.name}", 0, 0, "")
        read = workload.trace(machine.device)
    check_device(read, machine)
    return PreparedRun(
        planner=request.planner,
        options=options,
        machine=machine,
        trace=read,
        budget=budget,
        allow=split(request.allow),
        layout=request.layout,
        workload=workload,
    )


def _workload(request: Request) -> Workload:
    if request.model is None:
        raise InvalidInput("no model was named", hint="name one, as in `holdall plan gpt2`, or give a `--trace FILE`")
    return describe_workload(
        request.model,
        batch=request.batch,
        seq=request.seq,
        dtype=request.dtype,
        optimizer=request.optimizer,
        autocast=request.autocast,
        precision=request.precision,
    )


def _device_of(trace: Trace | None) -> str:
    return "auto" if trace is None else trace.about.device


def find_machine(
    name: str | None, path: Path | None, progress: Progress, *, device: str = "auto", budget: Budget = "auto"
) -> Hardware:
    """The GPU of that name, the machine of that file, or this machine, measured, with the tiers that the budget names."""
    if name is not None and path is not None:
        raise InvalidInput("both --gpu and --hardware were given", hint="give one of them")
    if name is not None:
        return gpu(name)
    if path is not None:
        if not path.exists() and str(path) in gpu_names():
            raise InvalidInput(f"`{path}` is the name of a GPU, not a file", hint=f"write `--gpu {path}`")
        return Hardware.load(path)
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "the trace is for a GPU, and this machine has none to measure",
            hint="name the GPU to plan for, as in `--gpu rtx-4090`, or trace again with `--device cpu`",
        )
    return with_tiers(probed(device, progress=progress), budget if isinstance(budget, Mapping) else ())


def check_device(trace: Trace, machine: Hardware) -> None:
    """Raise if trace and machine are for different devices: a GPU runs other kernels than a CPU."""
    traced = trace.about.device
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
    options: dict[str, Any] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInput(f"`--option {pair}` has no value", hint="write it as `--option key=value`")
        options[key] = read_value(value)
    return check_options(planner, options)


def check_options(planner: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, if the planner has them."""
    known = [field.name for field in dataclasses.fields(planner_class(planner))]
    for key in options:
        if not known:
            raise InvalidInput(f"planner {planner} has no options, but `{key}` was given", hint="leave it out")
        if key not in known:
            raise unknown_name(f"option of {planner}", key, known)
    try:
        build_member("planners", planner, options, f"option of {planner}")
    except InvalidInput as error:
        about_files = error.hint.startswith("write")  # the same reader reads plan files
        hint = "`holdall planners` lists options and their defaults" if about_files else error.hint
        raise InvalidInput(error.fact, hint=hint) from error
    return options


def planner_class(name: str) -> type[Any]:
    """The planner of that name; one that lacks a package says so."""
    try:
        return member_class("planners", name)
    except HoldallError:
        raise
    except ImportError as error:
        hint = "`holdall doctor` says what to install"
        raise MissingExtra(f"planner {name} cannot be used here: {first_line(error)}", hint=hint) from error


def split(text: str | None) -> list[str] | None:
    """A comma-separated list as a tuple; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def plain_outcome(trace: Trace, machine: Hardware | None = None) -> Outcome:
    """The outcome of plain training, whether it fits or not. Without a machine only the bytes are meaningful."""
    machine = machine or _any_machine(trace.about.device)
    problem = Problem(trace=cost_trace(trace, machine), hardware=machine, budget={})
    return simulate(problem, [], full=True, allocator=allocator_of(problem))


def _any_machine(device: str) -> Hardware:
    """A machine with arbitrary rates, for questions about bytes only."""
    tier = Tier(name="gpu" if device == "cuda" else "cpu", capacity=TiB, read=1e12, write=1e12)
    return Hardware(name="any", device=device, tiers=(tier,), flops={"float32": 1e13}, bandwidth=1e12)


def needed_bytes(outcome: Outcome) -> int:
    """The smallest budget for an outcome: its peak, or the bytes that the allocator reserves if known."""
    return max(next(iter(outcome.peak.values())), outcome.reserved or 0)


def activation_part(outcome: Outcome) -> int:
    """Bytes at the peak other than model, gradients, states and inputs: those that recompute and offload can reduce."""
    return next(iter(outcome.peak.values())) - sum(outcome.peak_kinds.get(kind, 0) for kind in _STAYS)


def budget_leaving(plain: Outcome, fraction: float) -> int:
    """The budget that leaves this fraction of the activation part of plain training."""
    return needed_bytes(plain) - round((1 - fraction) * activation_part(plain))
