"""Caches traces and plans across processes.

A plan depends on its problem: the costed trace, the machine, the budget, the planner and its options. All of that is in the
key, except for the process's other host memory, which varies little from run to run: a plan that still fits is reused. A trace
depends on code, which `tracing/identity.py` digests, and on the batch values that the step reads, which the trace names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from holdall.caching import key_of, open_cache
from holdall.errors import HoldallError
from holdall.registry import is_own
from holdall.tracing.identity import values_of
from holdall.types import Plan, Planner, Problem, Trace, _json

SLOW = 0.5  # seconds; only slower results are cached

Shapes = dict[str, tuple[int, ...]]


def remember_plan(problem: Problem, planner: Planner, make: Callable[[], Plan]) -> Plan:
    """The plan of this planner for this problem: found, or made and kept."""
    is_ours = is_own("planners", planner.name) and all(is_own("actions", name) for name in problem.allow)
    cache = open_cache()
    if not is_ours or cache.folder is None:  # others' code is not in the key
        return make()
    key = _plan_key(problem, planner)
    found = _read_plan(cache.get("plan", key), problem)
    if found is not None:
        return found
    began = time.perf_counter()
    made = make()
    if time.perf_counter() - began >= SLOW:
        cache.put("plan", key, made.to_json())
    return made


def _plan_key(problem: Problem, planner: Planner) -> str:
    trace = problem.trace
    about = replace(trace.about, process=0, besides=0, context=0, notes=())  # `besides` is one of its tensors
    asked = [
        problem.budget,
        sorted(problem.allow),
        problem.reads_gradients,
        problem.accumulate,
        problem.clipped,
        problem.layout,
    ]
    step = _json.pack(replace(trace, about=about))
    return key_of("plan", planner.name, _json.pack(planner), step, _json.pack(problem.hardware), asked)


def _read_plan(kept: Any, problem: Problem) -> Plan | None:
    if not isinstance(kept, dict):
        return None
    try:
        plan = Plan.from_json(kept, "the cache")
    except HoldallError:
        return None
    now, before = problem.trace.about.process, plan.about.process
    peak = dict(plan.predicted.peak)
    far = problem.hardware.far
    if far is not None and problem.hardware.device == "cuda":
        peak[far.name] = peak.get(far.name, 0) + now - before
        if peak[far.name] > problem.limit(far.name):
            return None  # it does not fit with the process's current memory
    about = replace(plan.about, process=now)
    return replace(plan, predicted=replace(plan.predicted, peak=peak), about=about)


def remember_trace(identity: str | None, batch: Any) -> tuple[Trace, Shapes] | None:
    """(trace of a step, shapes of the model's arguments); None: not cached."""
    kept = open_cache().get("trace", identity) if identity is not None else None
    if not isinstance(kept, dict):
        return None
    try:
        looked_at = {int(n): digest for n, digest in kept["looked_at"].items()}
        if values_of(batch, list(looked_at)) != looked_at:
            return None  # another batch, with which the step may take another branch
        trace: Trace = _json.unpack(Trace, kept["trace"], "the cache")
        return trace, {name: tuple(shape) for name, shape in kept["shapes"].items()}
    except (HoldallError, KeyError, TypeError, ValueError, AttributeError):
        return None


def keep_trace(identity: str | None, batch: Any, trace: Trace, shapes: Mapping[str, tuple[int, ...]], *, context: int) -> None:
    """Cache a trace. `context`: bytes of kernels on the device, which were loaded while ops were measured, and will
    be again."""
    if identity is None or trace.about.source != "fake":
        return
    about = replace(trace.about, process=0, besides=0, context=context)  # what describes the process is measured again
    looked_at = values_of(batch, list(trace.about.looked_at))
    value = {
        "trace": _json.pack(replace(trace, about=about)),
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "looked_at": {str(n): digest for n, digest in looked_at.items()},
    }
    open_cache().put("trace", identity, value)
