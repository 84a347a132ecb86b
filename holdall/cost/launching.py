"""What the thread that launches kernels spends on a step. A device with small ops waits for it.

Counted in starts of an op (`hardware.overhead`: a small step on almost no data, over its ops). The figures are means over
fourteen models of a few hundred to four thousand ops (transformers 5.17, torch 2.11, one H200), with batches so small that the
device never was what was slow: modules, views, autograd's nodes and hooks are in them. A single model is off by up to a third,
and so is the same model a minute later on a host that others share.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdall.cost.roofline import family_of
from holdall.types import Phase, Run, Schedule, Trace

LIGHT, HEAVY = 0, 1
_STARTS: Mapping[Phase, tuple[float, float]] = {  # of an op that moves bytes, and of one that a library chooses a kernel for
    Phase.FORWARD: (1.1, 2.6),
    Phase.BACKWARD: (0.7, 2.9),
    Phase.STEP: (0.5, 0.5),
}
_AGAIN = 1.5  # a block that is run again runs under hooks
_PROGRAM = 1.7  # ops that are called one by one from Python, with their views made by hand
COPY = 3.0  # a copy, with the events around it
OWN = 4.0  # what a plan adds for a unit: weights cast, gradients gathered, norms
PARAMETER = 0.6  # clipped and updated by a fused optimizer
PLACED = 1.5  # the same where the plan places states: norms that are looked up, an update unit by unit


def starts(trace: Trace) -> list[float]:
    """Of every op of the trace, as plain training launches it."""
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
    """Of one run; nothing where no kernel is started."""
    if run.op < 0:
        return OWN if run.seconds > 0 else 0.0
    if run.seconds <= 0:
        return 0.0
    return plain[run.op] * (_PROGRAM if run.op in programs else _AGAIN if run.again else 1.0)


def _weight(name: str) -> int:
    is_norm = name.startswith(("aten.native_", "aten.cudnn_", "aten._fused_rms")) and "norm" in name
    return HEAVY if is_norm or family_of(name) != "memory" else LIGHT
