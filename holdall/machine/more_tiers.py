"""Tiers beyond those that every machine has: a budget that names one lets it join.

The file of a tier says what it is (`holdall/tiers/__init__.py`); how fast it is here, its own copies say, measured once in a
process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from holdall.errors import Unsupported, unknown_name
from holdall.machine.probe import measure_tier
from holdall.registry import member_class, member_names
from holdall.types import Hardware, Link


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
    tier, duplex = _measured(name, hardware.device)
    behind = getattr(cls, "behind", "") or hardware.home.name
    latency = tier.latency if behind == hardware.home.name else max(0.0, tier.latency - hardware.tier(behind).latency)
    links = (
        Link(source=behind, destination=name, rate=tier.write, latency=latency, duplex=duplex),
        Link(source=name, destination=behind, rate=tier.read, latency=latency, duplex=duplex),
    )
    return replace(hardware, tiers=(*hardware.tiers, tier), links=(*hardware.links, *links))


_measured = lru_cache(maxsize=16)(measure_tier)
