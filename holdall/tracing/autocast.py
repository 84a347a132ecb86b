"""The autocast of a traced step: the one requested, or the one active where the trace is called.

A trace runs forward and loss under that autocast and backward and update without, as loops do, whatever autocast surrounds the
call. Casts of weights are cached until the outermost autocast context ends, so a trace begins outside all contexts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdall.errors import InvalidInput

Autocast = str | bool | torch.dtype | None

_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_OFF = ("no", "off", "fp32", "float32")
_KINDS = ("cpu", "cuda")


def resolve_autocast(autocast: Autocast, device: str) -> torch.dtype | None:
    """The dtype that a step on `device` is cast to; None: no autocast. `autocast=None`: the caller's current autocast."""
    if autocast is None:
        return autocast_now(device)
    if isinstance(autocast, bool):
        return torch.get_autocast_dtype(device) if autocast else None
    if isinstance(autocast, str) and autocast in _OFF:
        return None
    dtype = _NAMES.get(autocast) if isinstance(autocast, str) else autocast
    if dtype not in (torch.bfloat16, torch.float16):
        raise InvalidInput(
            f"autocast={autocast!r} is not a dtype that autocast casts to", hint='use "bf16", "fp16", True or False'
        )
    return dtype


def autocast_now(device: str) -> torch.dtype | None:
    """The dtype of the active autocast for this kind of device; None: it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Run outside every autocast context, with an empty cache; restores the contexts, with an empty cache."""
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    for kind in _KINDS:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # it would hold casts that are fake tensors
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(depth):
            torch.autocast_increment_nesting()
