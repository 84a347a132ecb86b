"""The device that a training run computes on, and the machine that its plan is for."""

from __future__ import annotations

import torch

from holdall.errors import InvalidInput, Unsupported, unknown_name
from holdall.problem import resolve_budget, resolve_hardware
from holdall.registry import member_class
from holdall.training import TrainOptions
from holdall.types import Hardware


def resolve_device(asked: str) -> str:
    """The run's device, as torch names it."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = asked.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise unknown_name("device", asked, ("auto", "cpu", "cuda"))
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unsupported("no CUDA device is available here", hint="train on the CPU: `--device cpu`")
    return asked


def resolve_machine(options: TrainOptions, device: str) -> Hardware:
    """The machine to plan for. A wrong planner or size is refused here, before anything slow."""
    member_class("planners", options.planner)
    machine = resolve_hardware(options.hardware, torch.device(device).type, options.budget)
    if machine.device != torch.device(device).type:
        hint = "leave `--hardware` out: this machine is then measured"
        raise InvalidInput(f"`{options.hardware}` computes on {machine.device}, but the run is on {device}", hint=hint)
    resolve_budget(options.budget, machine)
    return machine
