"""The time that the launching thread spends on a step. A device with short ops waits for it.

Counted in op launches (`hardware.overhead`: the time of a tiny step over its ops). The figures are means over fourteen models
of a few hundred to four thousand ops (transformers 5.17, torch 2.11, one H200), with batches so small that the device was never
the bottleneck: they include modules, views, autograd's nodes and hooks. A single model differs by up to a third, and so does
the same model a minute later on a shared host.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdall.cost.roofline import family_of
from holdall.types import Copy, Hardware, Kind, Phase, Run, Schedule, Trace

LIGHT, HEAVY = 0, 1
_STARTS: Mapping[Phase, tuple[float, float]] = {  # (an op that moves bytes, one whose kernel a library chooses)
    Phase.FORWARD: (1.1, 2.6),
    Phase.BACKWARD: (0.7, 2.9),
    Phase.STEP: (0.5, 0.5),
}
_AGAIN = 1.5  # a recomputed block runs under hooks
_PROGRAM = 1.7  # ops called one by one from Python, with their views
COPY = 3.0  # a copy, with its events
HELD = 0.6  # a saved tensor that is copied: autograd calls Python to pack it, and again to unpack it (timed on a CPU)
OWN = 4.0  # added by a plan per unit: casting weights, gathering gradients, norms
PARAMETER = 0.6  # clipped and updated by a fused optimizer
PLACED = 1.5  # the same with placed states: cached norms, updates unit by unit


def launching(hardware: Hardware) -> float:
    """Seconds of a launch beside the device; 0 on a CPU, where it is part of an op's seconds."""
    return hardware.overhead if hardware.device == "cuda" else 0.0


def starts(trace: Trace) -> list[float]:
    """Launches of every op of the trace in plain training."""
    known = trace.__dict__
    if "_starts" not in known:
        known["_starts"] = [_STARTS[op.site.phase][_weight(op.site.op)] for op in trace.ops]
        first = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), None)
        if first is not None:
            known["_starts"][first] += PARAMETER * sum(len(unit.grads) for unit in trace.units)
    found: list[float] = known["_starts"]
    return found


def by_program(schedule: Schedule) -> frozenset[int]:
    """The ops of blocks that run by a program."""
    trace = schedule.trace
    inside: set[int] = set()
    for number in schedule.programs:
        block = trace.blocks[number] if number >= 0 else trace.whole
        if block is not None:
            inside.update(range(block.first, block.last + 1))
            inside.update(op.id for op in trace.backward_of(block.module))
    return frozenset(inside)


def starts_of(run: Run, plain: list[float], programs: frozenset[int]) -> float:
    """Launches of one run; 0 if it starts no kernel."""
    if run.op < 0:
        return OWN if run.seconds > 0 else 0.0
    if run.seconds <= 0:
        return 0.0
    return plain[run.op] * (_PROGRAM if run.op in programs else _AGAIN if run.again else 1.0)


def _weight(name: str) -> int:
    is_norm = name.startswith(("aten.native_", "aten.cudnn_", "aten._fused_rms")) and "norm" in name
    return HEAVY if is_norm or family_of(name) != "memory" else LIGHT


def starts_of_copy(copy: Copy, trace: Trace) -> float:
    """Launches of a copy, one way."""
    held = sum(x in trace.tensors and trace.tensors[x].kind is Kind.ACTIVATION for x in copy.tensors)
    return COPY + HELD * held
