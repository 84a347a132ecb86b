"""The tensor cache over host memory: tensors stay on the device until an allocation fails; then the least recently used leave.

An op locks its operands while it runs. A tensor that is used again comes back first, and one that is not used any more is
freed. If everything fits, nothing is transferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Transfers(NamedTuple):
    out: list[int]  # tensors that leave, in order
    into: list[int]  # tensors that come back


def cached(accesses: Sequence[Sequence[int]], sizes: Mapping[int, int], room: float) -> Transfers | None:
    """The transfers of a step whose ops access these tensors, in order; None: one op's tensors do not fit together."""
    last = {x: n for n, used in enumerate(accesses) for x in used}
    here: dict[int, None] = {}  # least recently used first
    free = room
    found = Transfers([], [])
    away: set[int] = set()
    for n, used in enumerate(accesses):
        for x in dict.fromkeys(used):
            is_new = x not in here
            here.pop(x, None)
            here[x] = None
            if not is_new:
                continue
            free -= sizes[x]
            while free < 0:
                victim = next((y for y in here if y not in used), None)
                if victim is None:
                    return None
                del here[victim]
                free += sizes[victim]
                away.add(victim)
                found.out.append(victim)
            if x in away:
                away.remove(x)
                found.into.append(x)
        for x in [x for x in dict.fromkeys(used) if last[x] == n]:
            del here[x]
            free += sizes[x]
    return found


def eviction_order(accesses: Sequence[Sequence[int]], sizes: Mapping[int, int]) -> list[int]:
    """The order in which tensors leave when as many as possible do: those that leave first are the first to leave in any
    larger room."""
    least = max((sum(sizes[x] for x in set(used)) for used in accesses), default=0)
    found = cached(accesses, sizes, least)
    return list(dict.fromkeys(found.out)) if found is not None else []
