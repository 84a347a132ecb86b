"""The autocast of the loop, held against the one that its step was traced under.

The dtypes of most tensors, and with them bytes and times, follow from it. Where the first forward that is trained comes under
another autocast than was traced, all plans are made anew before it runs; a later change is said once.
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
    """All plans of a run: the one to begin with, and those that may take its place."""

    plan: Plan
    fallbacks: tuple[Plan, ...] = ()
    correct: Correct | None = None
    buckets: Buckets | None = None


@dataclass(frozen=True, kw_only=True)
class Recast:
    """`make`: traces and plans for this autocast. `forget`: nothing of the kind will be asked any more."""

    make: Callable[[torch.dtype | None], Prepared]
    forget: Callable[[], None]


class Casting:
    """Looks at the autocast under which forwards come."""

    def __init__(self, device: torch.device, recast: Recast | None, note: Callable[[str], None]) -> None:
        self._device = device.type
        self._recast = recast
        self._note = note

    def look(self, plan: Plan, change: Callable[[Callable[[], Prepared]], None]) -> None:
        """A forward that is trained begins. `change`: goes on under other plans, given what makes them."""
        dtype = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        now = str(dtype).removeprefix("torch.") if dtype is not None else None
        planned = plan.about.get("autocast", now)  # a plan from before this was written down: whatever comes
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
