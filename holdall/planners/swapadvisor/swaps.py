"""SwapAdvisor's swap planner and its simulator: who leaves when a slot is needed, and how long the step takes then.

Tensors live in slots: a class of sizes has a number of slots, and a tensor takes any free one of its class, so nothing is
fragmented. When none is free, the tensor of that class whose next use is farthest leaves (Belady), never one that the node
uses. Bytes that were copied out once need no second copy. A copy out may begin after the last use before it, a copy back when
the slot is free; three streams (computation, out, in) each serve their nodes in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Victim = Callable[[Sequence[int], int], int]  # (tensors in the slots that may leave, node) -> the one that leaves


class SwapNode(NamedTuple):
    """An op: the tensors that it uses, and its seconds."""

    uses: tuple[int, ...]
    seconds: float = 1.0


class SwapIn(NamedTuple):
    """A tensor that comes back: it left for the node `out`, and `back` uses it again."""

    tensor: int
    last: int  # its last use before it left
    out: int  # the node that needed its slot
    free: int  # the node after which the slot that it comes back to is free
    back: int


class SwapPlan(NamedTuple):
    swaps: tuple[SwapIn, ...]
    copies: int  # tensors copied out


def next_uses(nodes: Sequence[SwapNode]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for n, node in enumerate(nodes):
        for x in node.uses:
            found.setdefault(x, []).append(n)
    return found


def farthest(nodes: Sequence[SwapNode]) -> Victim:
    """Belady's choice: the tensor whose next use is farthest."""
    uses = next_uses(nodes)

    def choose(there: Sequence[int], at: int) -> int:
        return max(there, key=lambda x: next((n for n in uses[x] if n > at), len(nodes)))

    return choose


def plan_swaps(
    nodes: Sequence[SwapNode], kind: Mapping[int, int], slots: Sequence[int], *, victim: Victim | None = None, locked: int = -1
) -> SwapPlan | None:
    """The swaps for tensors of these classes in so many slots of each; None: one node's tensors do not fit. `locked`: node up
    to which a tensor that has uses there stays, because it could not come back in time."""
    choose = victim or farthest(nodes)
    uses = next_uses(nodes)
    held: list[dict[int, int]] = [{} for _ in slots]  # class -> tensor -> its last use
    freed = [[-1] * count for count in slots]  # class -> nodes after which its free slots are free
    away: dict[int, tuple[int, int]] = {}  # tensor -> (its last use, the node that needed its slot)
    copied: set[int] = set()
    swaps: list[SwapIn] = []
    for n, node in enumerate(nodes):
        for x in dict.fromkeys(node.uses):
            k = kind[x]
            if x not in held[k]:
                if not freed[k]:
                    there = [y for y in held[k] if y not in node.uses and not any(n < u <= locked for u in uses[y])]
                    if not there:
                        return None
                    gone = choose(there, n)
                    away[gone] = held[k].pop(gone), n
                    copied.add(gone)
                    freed[k].append(n - 1)
                free = freed[k].pop(freed[k].index(min(freed[k])))
                if x in away:
                    last, out = away.pop(x)
                    swaps.append(SwapIn(x, last, out, max(free, out), n))
            held[k][x] = n
        for x in dict.fromkeys(node.uses):
            if uses[x][-1] == n:
                del held[kind[x]][x]
                freed[kind[x]].append(n)
    return SwapPlan(tuple(swaps), len(copied))


def makespan(nodes: Sequence[SwapNode], plan: SwapPlan, sizes: Mapping[int, int], *, out: float, back: float) -> float:
    """Seconds of the step: every stream serves its nodes in order, and nodes wait for the copies that they need."""
    leaving: dict[int, list[SwapIn]] = {}
    coming: dict[int, list[SwapIn]] = {}
    needed_slot: dict[int, list[SwapIn]] = {}
    seen: set[int] = set()
    for swap in plan.swaps:
        if swap.tensor not in seen:  # else its bytes are out already
            leaving.setdefault(swap.last, []).append(swap)
            needed_slot.setdefault(swap.out, []).append(swap)
        seen.add(swap.tensor)
        coming.setdefault(swap.back, []).append(swap)
    ends: list[float] = []
    gone: dict[int, float] = {}
    out_free = back_free = clock = 0.0
    for n, node in enumerate(nodes):
        for swap in needed_slot.get(n, ()):
            clock = max(clock, gone[swap.tensor])
        for swap in coming.get(n, ()):
            begin = max(back_free, gone.get(swap.tensor, 0.0), ends[swap.free] if 0 <= swap.free < n else 0.0)
            back_free = begin + sizes[swap.tensor] / back
            clock = max(clock, back_free)
        clock += node.seconds
        ends.append(clock)
        for swap in leaving.get(n, ()):
            out_free = max(out_free, clock) + sizes[swap.tensor] / out
            gone[swap.tensor] = out_free
    return max(clock, out_free, back_free)
