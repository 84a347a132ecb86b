"""The plan's settings for model states as a whole, and the device the model computes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.unit import Placement
from holdall.types import Plan
from holdall.updates.parts import is_separable


@dataclass(frozen=True, kw_only=True)
class Placing:
    """An action's settings for model states as a whole; see `Engine`."""

    units: tuple[Placement, ...]
    when: str
    dtype: torch.dtype | None = None
    slots: int = 2
    share: bool = True
    ahead: bool = False
    overlap: bool = True
    release: str = ""
    prefetch: int = 1
    stretch: int = 1
    buffers: int = 1


def device_of(model: torch.nn.Module, plan: Plan) -> torch.device:
    """The device the model computes on: its own, or the one the plan moves it to."""
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    if device.type == "meta":
        raise Unsupported(
            "the model has no weights (it is on the meta device)", hint="build it on a real device, such as the CPU"
        )
    if device.type == "cpu" and plan.about.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_placeable(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse models and optimizers that the engine cannot handle."""
    if optimizer is not None and not is_separable(optimizer):
        raise Unsupported(
            f"{type(optimizer).__name__} updates all parameters together, so its update cannot be split into units",
            hint='use an elementwise optimizer, or keep its states on the device: fit(..., allow={"recompute", "offload"})',
        )
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise Unsupported(
                f"`{name}` has gradient hooks, which would not receive its gradient under this plan",
                hint='remove the hooks, or keep model states on the device: fit(..., allow={"recompute", "offload"})',
            )
