"""The random state around forwards that no step counts."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def same_random(device: torch.device) -> AbstractContextManager[None]:
    """Afterwards the random state of the host and of the device is as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
