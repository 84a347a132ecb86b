"""Seconds that the host's processors take for an optimizer's update."""

from __future__ import annotations

from holdall.types import Hardware, Trace, Unit
from holdall.types.trace import Seconds

_FAST = ("Adam", "AdamW")  # done by `updates/host_adam.py` in one pass over memory, for float32 parameters
_FAST_BYTES = 28  # bytes per parameter, with a gradient and weights of 16 bits
_OP_BY_OP = 2.1  # times as long per byte with torch's ops: 45 GB/s; one pass had 118 with caches, a fifth less without


def host_seconds(unit: Unit, trace: Trace, hardware: Hardware, *, beside: bool = False) -> Seconds:
    """Seconds of one unit's update without concurrent copies; `beside`: with copies both ways all the time.

    The simulator's clock decides when copies overlap it.
    """
    rate = (beside and hardware.updates_beside) or hardware.updates
    is_wide = all(trace.tensors[x].dtype == "float32" for x in unit.states)
    is_fast = trace.about.optimizer in _FAST and is_wide
    if is_fast or hardware.device != "cuda":  # on a CPU, the rate of updates is the rate of its memory
        return unit.numel / rate
    if unit.host_seconds:
        return unit.host_seconds * hardware.updates / rate
    return _OP_BY_OP * (unit.host_moved or unit.moved) / (_FAST_BYTES * rate)
