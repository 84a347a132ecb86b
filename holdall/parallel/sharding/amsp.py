"""AMSP (arXiv 2311.00257): parameters, gradients and optimizer states each get their own shard factor, the three that send for
the shortest time among all that fit the memory.

The factors are nested divisors of the ranks (`cost/sharding.py`), few enough to try all of them: 64 ranks have 84 triples.
"""

from __future__ import annotations

from holdall.cost.sharding import Links, ModelStates, ShardFactors, ShardStep, collectives_seconds, memory, nested_factors
from holdall.errors import Infeasible
from holdall.types.trace import Bytes
from holdall.units import format_bytes

_SAME = 1e-9  # relative difference below which two times are the same: rounding


def amsp_factors(model: ModelStates, step: ShardStep, links: Links, *, room: Bytes) -> ShardFactors:
    """The factors that spend least time in collectives with model states and gathered parameters in `room` bytes of a rank; of
    those that take as long, the ones that need least memory. Raises `Infeasible` with the least memory of any."""
    needs = {factors: memory(factors, model, step) for factors in nested_factors(step.ranks)}
    fitting = [factors for factors, need in needs.items() if need <= room]
    if not fitting:
        least = min(needs.values())
        raise Infeasible(
            f"model states over {step.ranks} ranks need {format_bytes(least)} on each, but there is room for "
            f"{format_bytes(room)}",
            hint="use more ranks, or offload states",
            smallest=least,
        )
    times = {factors: collectives_seconds(factors, model, step, links) for factors in fitting}
    longest = min(times.values()) * (1 + _SAME)
    return min((f for f in fitting if times[f] <= longest), key=lambda f: (needs[f], f))
