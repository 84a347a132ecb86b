"""Tiers beyond those that every machine has: a budget that names one lets it join.

The file of a tier says what it is (`holdall/tiers/__init__.py`); how fast it is here, its own copies say, measured once in a
process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from holdall.errors import Unsupported, unknown_name
from holdall.machine.probe import ProbeClock, measure_store, resolve_device
from holdall.registry import member_class, member_names
from holdall.types import Hardware, Link, QueueRate, Tier

_LONGEST = 0.7  # seconds after which no other queue depth is tried


def tier_names(device: str) -> tuple[str, ...]:
    """The tiers that can serve a kind of device."""
    return tuple(name for name in member_names("tiers") if device in member_class("tiers", name).serves)


def with_tiers(hardware: Hardware, names: Iterable[str]) -> Hardware:
    """The machine with these tiers, those that it does not have yet behind the others."""
    for name in names:
        if name not in {tier.name for tier in hardware.tiers}:
            hardware = _with(hardware, name)
    return hardware


def _with(hardware: Hardware, name: str) -> Hardware:
    if name not in member_names("tiers"):
        raise unknown_name("tier", name, {*(tier.name for tier in hardware.tiers), *tier_names(hardware.device)})
    cls = member_class("tiers", name)
    if hardware.device not in cls.serves:
        served = " or ".join(sorted(cls.serves)) or "no device that trains"
        raise Unsupported(
            f"the tier `{name}` serves {served}, and this machine computes on {hardware.device}",
            hint=f"tiers for it: {', '.join(tier_names(hardware.device))}",
        )
    behind = _behind(cls, hardware)
    is_behind = behind != hardware.home.name
    from_host = is_behind and "cpu" in cls.serves  # then what was measured is the last hop alone
    tier, duplex, queue = _measured(name, "cpu" if from_host else hardware.device, _where(cls))
    before = hardware.tier(behind).latency if is_behind else 0.0
    latency = tier.latency if from_host else max(0.0, tier.latency - before)
    links = (
        Link(source=behind, destination=name, rate=tier.write, latency=latency, duplex=duplex),
        Link(source=name, destination=behind, rate=tier.read, latency=latency, duplex=duplex),
    )
    if from_host:
        tier = _through(tier, hardware.tier(behind))
    about = replace(hardware.about, queue=(*hardware.about.queue, *queue))
    return replace(hardware, tiers=(*hardware.tiers, tier), links=(*hardware.links, *links), about=about)


def _behind(cls: type[Any], hardware: Hardware) -> str:
    """The tier that the bytes of another one pass through: the one that it names, if the machine has it."""
    named = getattr(cls, "behind", "")
    return named if named in {tier.name for tier in hardware.tiers} else hardware.home.name


def _where(cls: type[Any]) -> str:
    """What the rates depend on besides the machine, such as a folder."""
    return str(cls.where()) if hasattr(cls, "where") else ""


def _through(tier: Tier, nearer: Tier) -> Tier:
    """The tier as the accelerator sees it, through a nearer one."""
    read, write = min(tier.read, nearer.read), min(tier.write, nearer.write)
    return replace(tier, read=read, write=write, latency=tier.latency + nearer.latency)


@lru_cache(maxsize=16)
def _measured(name: str, device: str, _: str) -> MeasuredTier:
    return measure_tier(name, device)


class MeasuredTier(NamedTuple):
    tier: Tier
    duplex: float  # what is left of its rates when both ways are busy
    queue: tuple[QueueRate, ...]  # by the number of requests in flight; empty: it has no queue


def measure_tier(name: str, device: str) -> MeasuredTier:
    """A tier as the copies of its own store show it."""
    clock = ProbeClock(torch.device(resolve_device(device)), 0.04)
    cls = member_class("tiers", name)
    with torch.no_grad():
        with closing(cls(device=clock.device)) as store:
            tier, duplex = measure_store(store, clock)
        queue = _by_depth(name, cls, clock)
    tier = replace(tier, capacity=cls.room()) if hasattr(cls, "room") else tier
    return MeasuredTier(tier, duplex, queue)


def _by_depth(name: str, cls: Any, clock: ProbeClock) -> tuple[QueueRate, ...]:
    """Rates by queue depth, for at most a second or so: those of a slow disk are known after the first."""
    found: list[QueueRate] = []
    begun = time.perf_counter()
    for depth in getattr(cls, "depths", ()):
        if found and time.perf_counter() - begun > _LONGEST:
            break
        with closing(cls(device=clock.device, depth=depth)) as store:
            tier, duplex = measure_store(store, clock)
        found.append(QueueRate(tier=name, depth=depth, read=tier.read, write=tier.write, duplex=duplex))
    return tuple(found)
