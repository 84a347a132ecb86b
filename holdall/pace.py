"""Detects whether a GPU was busy when it was measured, or is now.

Rates, times of ops and traces are kept on disk. What was measured while another process used the GPU would spoil every later
plan. Disturbances only add time, so two short timings tell: if the GPU is faster than on record, the record was made on a busy
GPU, and what was kept since then is measured again; if it is slower, it is busy now, and nothing is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from holdall.caching import key_of, open_cache

log = logging.getLogger("holdall")
_CHANGED = 1.3  # clocks and heat change less than that
_RUNS = 40  # long enough for clocks to rise
_SIDE = 2048  # of the matrices that are multiplied
_ELEMENTS = 1 << 24  # of the vectors that are added


@dataclass(frozen=True, slots=True)
class Pace:
    since: float  # when the record was made; part of the key of every cache entry about the device
    is_busy: bool  # measurements made now are not cached


def pace_of(device: torch.device) -> Pace:
    """The pace of a GPU, measured once per process; that of any other device never changes."""
    if device.type != "cuda" or not torch.cuda.is_available() or open_cache().folder is None:
        return Pace(0.0, False)
    return _look(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _look(index: int) -> Pace:
    gpu = torch.cuda.get_device_properties(index)
    key = key_of("pace", gpu.name, gpu.total_memory, torch.__version__, torch.version.cuda)
    try:
        now = _timings(torch.device("cuda", index))
    except torch.OutOfMemoryError:
        return Pace(0.0, True)
    pace, record, said = judge(open_cache().get("probe", key), now, time.time())
    if record is not None:
        open_cache().put("probe", key, record)
    if said:
        log.warning("holdall: %s", said)
    return pace


def judge(kept: Any, now: list[float], clock: float) -> tuple[Pace, dict[str, Any] | None, str]:
    """(pace, a new record or None, a warning) from the record on disk and the seconds measured now."""
    then = kept.get("seconds") if isinstance(kept, dict) else None
    if not isinstance(then, list) or len(then) != len(now) or not all(isinstance(s, float) and s > 0 for s in then):
        return Pace(clock, False), {"since": clock, "seconds": now}, ""
    slower = max(a / b for a, b in zip(now, then, strict=True))
    faster = max(b / a for a, b in zip(now, then, strict=True))
    if faster > _CHANGED:
        told = f"the GPU is {faster:.1f} x as fast as when it was measured: measuring it again"
        return Pace(clock, False), {"since": clock, "seconds": now}, told
    if slower > _CHANGED:
        told = (
            f"the GPU takes {slower:.1f} x as long as it did: another process may be using it, so what is measured is not kept"
        )
        return Pace(float(kept["since"]), True), None, told
    return Pace(float(kept["since"]), False), None, ""


def _timings(device: torch.device) -> list[float]:
    """Seconds of one product and one addition, the best of several each."""
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        matrix = torch.full((_SIDE, _SIDE), 0.5, device=device, dtype=torch.float16)
        vector = torch.full((_ELEMENTS,), 0.5, device=device, dtype=torch.float32)
        found = [_best(partial(torch.mm, matrix, matrix)), _best(partial(vector.add_, 1.0))]
    del matrix, vector
    torch.cuda.empty_cache()
    return found


def _best(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_RUNS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        best = min(best, begun.elapsed_time(ended) / 1000)
    return best
