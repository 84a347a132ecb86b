"""Says when a tier serves its requests far more slowly than the plan takes it to: a disk that others use, or that throttles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdall.types import Plan
from holdall.units import format_rate

_FACTOR = 2.0  # so much slower is no noise
_LEAST = 0.02  # seconds of requests before anything is said


def slow_tiers(plan: Plan, stores: Mapping[str, Any]) -> list[str]:
    """A note for each tier and direction that is slower than planned."""
    found = []
    for rates in plan.about.rates:
        store = stores.get(rates.tier)
        for verb, name, rate in (("reads", "reading", rates.read), ("writes", "writing", rates.write)):
            times = getattr(store, name, None)
            if times is None or times.seconds < _LEAST:
                continue
            planned = times.nbytes / rate + times.requests * rates.latency
            if times.seconds > _FACTOR * planned:
                seen, said = (format_rate(times.nbytes / seconds, "B") for seconds in (times.seconds, planned))
                found.append(
                    f"the tier `{rates.tier}` {verb} {seen}, and the plan was made for {said}: "
                    "steps may take longer than predicted; look for others that use it, or run again, which measures it"
                )
    return found
