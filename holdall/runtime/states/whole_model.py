"""Brings a model from the host to the device that its plan was made for, where no action of the plan places model states."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdall.types import Plan


def bring(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, plan: Plan, device: torch.device
) -> Callable[[], None]:
    """Move the whole model with its gradients and optimizer states. Returns the function that moves them back. A model that is
    divided over ranks goes there part by part, and stays."""
    first = next(model.parameters(), None)
    moves = any(action.places_states or action.over_ranks for action in plan.actions)
    if first is None or first.device.type == device.type or moves:
        return lambda: None
    came_from = first.device

    def move(to: torch.device) -> None:
        model.to(to)  # parameters stay the same objects: the optimizer's are moved with them
        if optimizer is not None:
            _move_states(optimizer)

    def send_back() -> None:
        move(came_from)

    try:
        move(device)
    except BaseException:  # out of memory half way
        move(came_from)
        raise
    return send_back


def _move_states(optimizer: torch.optim.Optimizer) -> None:
    """Put every state beside its parameter; counts of steps stay on the host unless a fused or captured update reads them."""
    for group in optimizer.param_groups:
        reads_count = bool(group.get("fused") or group.get("capturable"))
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and (name != "step" or reads_count):
                    optimizer.state[p][name] = value.to(p.device)
