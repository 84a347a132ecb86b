"""Seconds for one copy between two memories; several at once are the simulator's clock's business.

Where no link joins the two, bytes pass through the tiers between, piece by piece: all links of the way are busy at once, the
slowest decides, and every one adds its latency.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from holdall.types import Hardware
from holdall.types.trace import Bytes, Seconds


def copy_seconds(nbytes: Bytes, hardware: Hardware, source: str, destination: str, *, both_busy: bool = False) -> Seconds:
    """One copy from tier to tier; none inside of a tier. `both_busy`: the other direction is in use all the while."""
    path = hardware.path(source, destination)
    rate = min(((link.duplex if both_busy else 1.0) * link.rate for link in path), default=inf)
    return sum(link.latency for link in path) + nbytes / rate


def link_rate(hardware: Hardware, source: str, destination: str) -> float:
    """Bytes per second from tier to tier, alone."""
    return min(link.rate for link in hardware.path(source, destination))


class Reach(NamedTuple):
    """A tier as the accelerator sees it: seconds before the first byte, bytes per second to it and from it."""

    latency: Seconds
    write: float
    read: float


def reach(hardware: Hardware, tier: str) -> Reach:
    """Over all links of the way."""
    home = hardware.home.name
    latency = sum(link.latency for link in hardware.path(home, tier))
    return Reach(latency, link_rate(hardware, home, tier), link_rate(hardware, tier, home))
