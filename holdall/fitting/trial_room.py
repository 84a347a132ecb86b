"""Keeps `fit` itself within the budget: it times ops on the GPU before there is a plan, and some are large.

The allocator is limited meanwhile, so that an op which has no room is not timed; its time is then estimated from rates. Where
the model fills the budget already, there is a little room all the same, or nothing could be timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from holdall.problem import Budget
from holdall.runtime.budget.meter import device_context
from holdall.types.trace import Bytes
from holdall.units import GiB, parse_bytes

_LEAST = 2 * GiB  # beside what is allocated already


@contextmanager
def within(budget: Budget, device: torch.device) -> Iterator[None]:
    """Limits the allocator of a GPU to the budget's share for it; elsewhere, and without a budget, nothing is done."""
    asked = budget.get("gpu", "auto") if isinstance(budget, Mapping) else budget
    if device.type != "cuda" or not torch.cuda.is_available() or asked == "auto":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    limit = limit_of(
        parse_bytes(asked, total=total), context=device_context(device), allocated=torch.cuda.memory_allocated(device)
    )
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(before, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def limit_of(budget: Bytes, *, context: Bytes, allocated: Bytes) -> Bytes:
    """What the allocator may take: the budget less what lies outside the allocator, but a little more than it has now."""
    return max(budget - context, allocated + _LEAST)
