"""Compares the loop's autocast with the one that its step was traced under.

Autocast decides the dtypes of most tensors, and so bytes and times. If the first training forward runs under another autocast
than traced, all plans are made again before it runs; a later change is reported once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from holdall.runtime.switching.buckets import Buckets
from holdall.runtime.switching.trials import Correct
from holdall.types import Plan

_ANEW = "tracing and planning it again"
_DIFFERS = "memory and time will differ from the prediction"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All plans of a run: the first, and its alternatives."""

    plan: Plan
    fallbacks: tuple[Plan, ...] = ()
    correct: Correct | None = None
    buckets: Buckets | None = None


@dataclass(frozen=True, kw_only=True)
class Recast:
    """`make`: traces and plans for this autocast. `forget`: releases what `make` needs."""

    make: Callable[[torch.dtype | None], Prepared]
    forget: Callable[[], None]


class Casting:
    """Checks the autocast of forwards."""

    def __init__(self, device: torch.device, recast: Recast | None, note: Callable[[str], None]) -> None:
        self._device = device.type
        self._recast = recast
        self._note = note

    def look(self, plan: Plan, change: Callable[[Callable[[], Prepared]], None]) -> None:
        """A training forward begins. `change`: switches to the plans that the given function makes."""
        dtype = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        now = str(dtype).removeprefix("torch.") if dtype is not None else None
        planned = now if plan.about.autocast == "" else plan.about.autocast  # older plans do not record it: accept any
        recast, self._recast = self._recast, None
        if now != planned:
            what = f"the forward runs {_worded(now)}, but the step was traced {_worded(planned)}"
            self._note(f"{what}: {_ANEW if recast is not None else _DIFFERS}")
            if recast is not None:
                change(partial(recast.make, dtype))
        if recast is not None:
            recast.forget()


def _worded(autocast: str | None) -> str:
    return f"under autocast to {autocast}" if autocast is not None else "without autocast"
