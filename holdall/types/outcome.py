"""What a step costs. Predicted and measured outcomes are the same type, so a report is a subtraction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdall.types.trace import Bytes, Kind, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes in the accelerator's memory at one moment of the step."""

    at: Seconds
    where: str  # the op just run
    total: Bytes
    kinds: Mapping[Kind, Bytes] = field(default_factory=dict)  # empty where only the total is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time on one lane: compute, a copy direction, waiting."""

    lane: str
    name: str
    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One tensor that sits in memory at the peak."""

    name: str
    kind: Kind
    nbytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    source: str  # "simulated" or "measured"
    seconds: Seconds
    peak: Mapping[str, Bytes]  # tier -> bytes
    recompute_seconds: Seconds | None = None  # None: not known
    stall_seconds: Seconds | None = None  # computation waiting for copies; None: not known
    churn: Seconds = 0.0  # of `seconds`: the allocator moves pages, because free ones are in the wrong places
    cramped: bool = False  # the allocator may run out of pages before the device runs out of bytes
    reserved: Bytes | None = None  # what the allocator takes from the device at the peak; None: not known
    traffic: Mapping[str, Bytes] = field(default_factory=dict)  # "gpu->cpu" -> bytes per step
    peak_where: str = ""  # the op at the peak
    at_peak: tuple[Holder, ...] = ()  # largest first
    peak_kinds: Mapping[Kind, Bytes] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()
    lanes: tuple[Span, ...] = ()
