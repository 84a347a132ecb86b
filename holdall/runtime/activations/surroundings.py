"""What a call depends on besides its inputs and its module: random numbers and autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

RandomState = tuple[torch.Tensor, list[int], list[torch.Tensor]]  # (host state, device indices, state per device)


def random_state(leaves: Sequence[Any]) -> RandomState:
    devices, states = get_device_states(*[t for t in leaves if isinstance(t, torch.Tensor)])
    return torch.get_rng_state(), list(devices), list(states)


def set_random_state(state: RandomState | None) -> None:
    if state is not None:
        torch.set_rng_state(state[0])
        set_device_states(state[1], state[2])


def autocast_state(leaves: Sequence[Any]) -> list[tuple[str, bool, torch.dtype]]:
    kinds = {"cpu"} | {t.device.type for t in leaves if isinstance(t, torch.Tensor) and t.device.type in ("cpu", "cuda")}
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)]
