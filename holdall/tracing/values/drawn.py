"""Random numbers that a step reads while it is traced.

They are new in each step, so no value is right for all steps. A single number between 0 and 1 decides whether a layer is
skipped (`torch.rand([]) < layerdrop`): the largest possible value is used, so no layer is skipped and the plan is for the step
that needs most. Small integers are drawn with a fixed seed, and the random state is restored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FRACTIONS = ("aten.rand.", "aten.rand_like.", "aten.uniform_.")
_INTEGERS = ("aten.randint.", "aten.randperm.")
_SMALL = 2**12  # elements


def fraction(func: Any, args: Any, kwargs: Any, out: Any) -> torch.Tensor | None:
    """The largest possible value of `out`, if it is one random number of an interval."""
    if not str(func).startswith(_FRACTIONS) or not isinstance(out, torch.Tensor) or out.numel() != 1:
        return None
    low, high = _interval(args, kwargs) if str(func).startswith("aten.uniform_.") else (0.0, 1.0)
    if not out.is_floating_point():
        return None
    with _disable_current_modes():
        return torch.full(out.shape, high - (high - low) * torch.finfo(out.dtype).eps, dtype=out.dtype)


def integers(func: Any, args: Any, kwargs: Any, out: Any) -> torch.Tensor | None:
    """Values for `out`, if it consists of a few random integers."""
    if not str(func).startswith(_INTEGERS) or kwargs.get("generator") is not None:
        return None
    if not isinstance(out, torch.Tensor) or out.numel() > _SMALL:
        return None
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        value: torch.Tensor = func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})
    return value


def _interval(args: Any, kwargs: Any) -> tuple[float, float]:
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    return float(low), float(high)
