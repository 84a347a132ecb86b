"""Where what leaves a stage's device goes."""

from __future__ import annotations

import torch

from holdall.tiers import Keeper
from holdall.tiers.cpu import Cpu
from holdall.tiers.far import Far


def host_of(device: torch.device) -> Keeper:
    """The host's memory; for stages that compute on the CPU, other memory of it."""
    return Cpu(device=device) if device.type == "cuda" else Far()
