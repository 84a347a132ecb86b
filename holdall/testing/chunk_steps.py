"""For tests of planners that move chunks: small traced steps, and the fewest loads that any way to evict needs."""

from __future__ import annotations

from holdall.planning.chunk_tracer import TracedStates, UseMoment
from holdall.types import Unit


def step_of_units(sizes: list[int], others: list[int] | int = 0, *, width: int = 2, state_width: float = 12) -> TracedStates:
    """A forward over units of one parameter each and a backward in reverse. `others`: bytes by moment, or always."""
    units = tuple(
        Unit(id=n, name=f"u{n}", params=(f"u{n}.w",), weights=(n,), grads=(), states=(), numel=size, moved=0, workspace=0)
        for n, size in enumerate(sizes)
    )
    order = [*range(len(sizes)), *reversed(range(len(sizes)))]
    free = others if isinstance(others, list) else [others] * len(order)
    return TracedStates(
        units=units,
        fixed=frozenset(),
        moments=tuple(UseMoment(unit=u, is_backward=n >= len(sizes), others=free[n]) for n, u in enumerate(order)),
        params=tuple(enumerate(sizes)),
        width=width,
        state_width=state_width,
    )


def fewest_loads(accesses: list[int], blocks: int) -> int:
    """Over all ways to evict."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chunk in accesses:
        after: dict[frozenset[int], int] = {}
        for here, loads in states.items():
            if chunk in here:
                choices = [(here, loads)]
            elif len(here) < blocks:
                choices = [(here | {chunk}, loads + 1)]
            else:
                choices = [(here - {out} | {chunk}, loads + 1) for out in here]
            for key, cost in choices:
                after[key] = min(cost, after.get(key, cost))
        states = after
    return min(states.values())
