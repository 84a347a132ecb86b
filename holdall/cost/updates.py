"""Seconds that the host's processors take for an optimizer's update."""

from __future__ import annotations

from holdall.types import Hardware, Trace, Unit
from holdall.types.trace import Seconds

_FAST = ("Adam", "AdamW")  # which `updates/host_adam.py` does in one walk over memory, where parameters are float32
_FAST_BYTES = 28  # a parameter, with a gradient and weights of 16 bits
_OP_BY_OP = 2.1  # as long a byte where torch's own ops do it: 45 GB/s; walks had 118 with caches' help, a fifth less without


def host_seconds(unit: Unit, trace: Trace, hardware: Hardware, *, beside: bool = False) -> Seconds:
    """Of one unit's update, if no copies take of the host's memory meanwhile; `beside`: if they do, both ways and all the time.
    What happens when is the simulator's clock's business."""
    rate = (beside and hardware.updates_beside) or hardware.updates
    is_wide = all(trace.tensors[x].dtype == "float32" for x in unit.states)
    is_fast = trace.about.get("optimizer") in _FAST and is_wide
    if is_fast or hardware.device != "cuda":  # a CPU's rate of updates stands for its memory
        return unit.numel / rate
    if unit.host_seconds:
        return unit.host_seconds * hardware.updates / rate
    return _OP_BY_OP * (unit.host_moved or unit.moved) / (_FAST_BYTES * rate)
