"""User arguments -> Problem: machine, budget, allowed actions, precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from holdall import optim
from holdall.cost.roofline import cost_trace
from holdall.errors import InvalidInput, Unsupported, unknown_name
from holdall.machine.more_tiers import with_tiers
from holdall.machine.presets import gpu
from holdall.machine.probe import probed
from holdall.precision import Recipe, plannable
from holdall.registry import allowed_by_default, member_classes, member_names
from holdall.runtime.budget.meter import device_context
from holdall.types import Hardware, Problem, Progress, Trace
from holdall.types.plan import silent
from holdall.units import parse_bytes

Budget = str | int | float | Mapping[str, str | int | float]

PROBLEM = ("budget", "hardware", "allow", "reads_gradients", "accumulate", "layout", "progress")


def make_problem(
    trace: Trace,
    *,
    budget: Budget = "auto",
    hardware: Hardware | str | Path | None = None,
    allow: Iterable[str] | None = None,
    reads_gradients: bool = True,
    accumulate: int = 1,
    layout: str | None = None,
    progress: Progress = silent,
) -> Problem:
    """The problem for a planner; arguments as in `plan`."""
    progress("looking at this machine", 0, 0, "")
    machine = hardware_for(trace, hardware, budget)
    progress("planning", 0, 0, "")
    given: dict[str, Any] = {"allow": allow, "reads_gradients": reads_gradients, "accumulate": accumulate, "layout": layout}
    return bare_problem(cost_trace(trace, machine), machine, budget=budget, progress=progress, **given)


def bare_problem(
    trace: Trace,
    hardware: Hardware,
    *,
    budget: Budget = "auto",
    allow: Iterable[str] | None = None,
    reads_gradients: bool = True,
    accumulate: int = 1,
    layout: str | None = None,
    progress: Progress = silent,
) -> Problem:
    """The problem with the given trace, which may be costed already."""
    return Problem(
        trace=trace,
        hardware=hardware,
        budget=resolve_budget(budget, hardware),
        allow=resolve_allow(allow),
        reads_gradients=reads_gradients,
        accumulate=accumulate,
        layout=resolve_layout(layout),
        progress=progress,
    )


def hardware_for(trace: Trace, hardware: Hardware | str | Path | None, budget: Budget = "auto") -> Hardware:
    """The machine for a trace, with the memory that kernels took where the trace's ops were measured."""
    machine = resolve_hardware(hardware, trace.about.device, budget)
    if trace.about.timed != machine.name:
        return machine
    return replace(machine, context=max(machine.context, trace.about.context))


@lru_cache(maxsize=4)
def _probed(device: str) -> Hardware:
    return probed(device)


def resolve_hardware(hardware: Hardware | str | Path | None, device: str, budget: Budget = "auto") -> Hardware:
    """The machine to plan for: given, from a file, by the name of a GPU, or probed; plus the tiers that the budget names."""
    if isinstance(hardware, Hardware):
        return _as_it_is_now(hardware)
    if hardware is None:
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidInput(
                "the trace is for a GPU, and this machine has none to measure",
                hint='name the GPU to plan for: hardware="rtx-4090"',
            )
        return with_tiers(_as_it_is_now(_probed(device)), budget if isinstance(budget, Mapping) else ())
    text = str(hardware)
    if isinstance(hardware, Path) or text.endswith(".json"):
        return _as_it_is_now(Hardware.load(hardware))
    return gpu(text)


def _as_it_is_now(hardware: Hardware) -> Hardware:
    """The machine with the memory that kernels now take on this process's GPU, if it is the same: they are loaded
    at first use."""
    is_here = hardware.device == "cuda" and torch.cuda.is_available() and torch.cuda.is_initialized()
    if not is_here or hardware.name != torch.cuda.get_device_name():
        return hardware
    now = device_context(torch.device("cuda", torch.cuda.current_device()))
    return replace(hardware, context=max(hardware.context, now))


def resolve_budget(budget: Budget, hardware: Hardware) -> dict[str, int]:
    """Bytes per tier. A single value is for the accelerator's own memory."""
    names = [tier.name for tier in hardware.tiers]
    given = budget if isinstance(budget, Mapping) else {hardware.home.name: budget}
    resolved = {}
    for tier, value in given.items():
        if tier not in names and tier in member_names("tiers"):
            raise InvalidInput(
                f"the budget names the tier `{tier}`, which the machine {hardware.name} does not have",
                hint=f"measure that machine with `holdall probe --tiers {tier} --out FILE`, and plan with `--hardware FILE`",
            )
        if tier not in names:
            raise unknown_name("tier", str(tier), names)
        capacity = hardware.tier(tier).capacity
        resolved[tier] = capacity if value == "auto" else parse_bytes(value, total=capacity)
    return {name: resolved.get(name, hardware.tier(name).capacity) for name in names}


def resolve_allow(allow: Iterable[str] | None) -> frozenset[str]:
    """Names of the actions that may be used."""
    if allow is None:
        return allowed_by_default()
    names = [allow] if isinstance(allow, str) else list(allow)
    known = member_names("actions")
    for name in names:
        if name not in known:
            raise unknown_name("action", name, known)
    return frozenset({"keep", *names})


def resolve_layout(layout: str | None) -> str:
    """The name of a static layout; empty: none is asked for."""
    if layout is None:
        return ""
    static = [member.name for member in member_classes("layouts") if member.is_static and not hasattr(member, "reorder")]
    if not isinstance(layout, str) or layout not in static:
        raise unknown_name("static layout", str(layout), static)
    return layout


def resolve_optimizer(optimizer: torch.optim.Optimizer | str | None, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer itself, or one by its name (see `holdall.optim.make`) over the model's parameters."""
    return optim.make(optimizer, model) if isinstance(optimizer, str) else optimizer


Precision = str | torch.dtype | Recipe | None


def resolve_recipe(precision: Precision) -> Recipe | None:
    """The recipe of that name; None: no precision was given, or only the dtype of working copies, which needs no recipe."""
    if precision in ("fp16", "float16"):
        raise Unsupported(
            "fp16 needs its loss scaled, which a plan does not do: small gradients would become zero",
            hint='use precision="bf16"; or torch.float16 if the loop scales the loss; or `holdall.precision.prepare("O2")`',
        )
    return None if precision is None or isinstance(precision, torch.dtype) else plannable(precision)


def resolve_precision(precision: Precision) -> torch.dtype | None:
    """The dtype of the working copies; None: modules compute with the parameters themselves."""
    if isinstance(precision, torch.dtype):
        return precision
    recipe = resolve_recipe(precision)
    return recipe.copies if recipe is not None else None
