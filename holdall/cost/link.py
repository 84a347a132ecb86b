"""Seconds for one copy between the device and a farther memory; the simulator's clock handles concurrent ones."""

from __future__ import annotations

from holdall.errors import InvalidInput, unknown_name
from holdall.types import Hardware, Tier
from holdall.types.trace import Bytes, Seconds

OUT, IN = "out", "in"  # from the device, to the device


def copy_seconds(nbytes: Bytes, tier: Tier, hardware: Hardware, direction: str, both_busy: bool = False) -> Seconds:
    """Seconds of one copy between the device and `tier`. `both_busy`: the other direction is in use meanwhile."""
    share = hardware.duplex if both_busy else 1.0
    return tier.latency + nbytes / (share * link_rate(tier, direction))


def link_rate(tier: Tier, direction: str) -> float:
    """Bytes per second of one direction, alone."""
    if direction not in (OUT, IN):
        raise unknown_name("direction", direction, (OUT, IN))
    rate = tier.write if direction == OUT else tier.read
    if rate <= 0:
        raise InvalidInput(
            f"the memory `{tier.name}` has no rate for copies {direction}",
            hint="give its `read` and `write` in bytes per second",
        )
    return rate
