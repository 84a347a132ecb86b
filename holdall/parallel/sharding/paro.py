"""PaRO (arXiv 2310.06003): parameters, gradients and optimizer states are each replicated (N), sharded inside a group of near
ranks (I), or sharded globally (G); the triple with the shortest step that fits.

A triple is written in that order: IIG shards parameters and gradients inside the group, optimizer states over all ranks. Only
triples that never shard less from one to the next are of use, ten of them. `triples.py` runs them, `ho_ring.py` has their
collectives.
"""

from __future__ import annotations

from itertools import product

from holdall.cost.sharding import Links, ModelStates, ShardFactors, ShardStep, memory, step_seconds
from holdall.errors import Infeasible, InvalidInput
from holdall.types.trace import Bytes
from holdall.units import format_bytes

LETTERS = "NIG"
TRIPLES = tuple("".join(t) for t in product(LETTERS, repeat=3) if list(t) == sorted(t, key=LETTERS.index))


def paro_factors(triple: str, ranks: int, group: int) -> ShardFactors:
    """The shard factors of a triple over `ranks` ranks in groups of `group`."""
    if triple not in TRIPLES:
        raise InvalidInput(f"`{triple}` is no triple of PaRO", hint=f"one of {', '.join(TRIPLES)}")
    if ranks % group:
        raise InvalidInput(f"{ranks} ranks do not fill groups of {group}", hint="use a divisor")
    sizes = {"N": 1, "I": group, "G": ranks}
    p, g, o = (sizes[letter] for letter in triple)
    return ShardFactors(p, g, o)


def paro_triple(model: ModelStates, step: ShardStep, links: Links, *, group: int, room: Bytes) -> str:
    """The triple with the shortest step among those whose states and gathered parameters fit `room` bytes of a rank; of equals
    the one that needs least memory. Raises `Infeasible` with the least memory of any."""
    found = []
    for triple in TRIPLES:
        factors = paro_factors(triple, step.ranks, group)
        found.append((memory(factors, model, step), step_seconds(factors, model, step, links), triple))
    fitting = [one for one in found if one[0] <= room]
    if not fitting:
        least = min(found)[0]
        raise Infeasible(
            f"no triple of PaRO fits {format_bytes(room)} on a rank; the smallest needs {format_bytes(least)}",
            hint="use more ranks, or offload states",
            smallest=least,
        )
    shortest = min(seconds for _, seconds, _ in fitting) * (1 + 1e-9)  # but for rounding
    return min(one for one in fitting if one[1] <= shortest)[2]
