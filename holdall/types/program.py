"""Orders in which the ops of a block may be run: what makes one legal, and which ops belong together.

An op is what it reads, makes and changes. Ops in place make the same tensor mean different things at different times, so a
value is a tensor and how often it has been changed; an order is right if every op sees the values that it first saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Effect(NamedTuple):
    """What one op does to tensors, by any kind of number."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...] = ()


def fault(ops: Sequence[Effect], count: int, forward: Sequence[int], backward: Sequence[int]) -> str:
    """Why this order would not do what the block does; empty if it does. The first `count` ops are the forward's."""
    if sorted(set(forward)) != list(range(count)):
        return "its forward must run every op of the forward"
    if [n for n in backward if n >= count] != list(range(count, len(ops))):
        return "its backward must run every op of the backward, in order"
    if any(n < 0 for n in backward) or (backward and backward[-1] < count):
        return "its backward must end with an op of the backward"
    own = {x for op in ops for x in op.writes}
    expected = _values(ops, own)
    now: dict[int, int] = {}
    for n in (*forward, *backward):
        op = ops[n]
        seen = {x: now.get(x, -1) for x in (*op.reads, *op.mutates) if x in own}
        if seen != expected[n]:
            return f"op {n} would not find what it reads"
        now.update(dict.fromkeys(op.writes, 0))
        for x in op.mutates:
            if x in own:
                now[x] += 1
    last = _last_values(ops, own)
    made = {x: v for x, v in now.items() if x in last}
    if any(made[x] != last[x] for x in made):
        return "a tensor would be left half made"
    return ""


def _values(ops: Sequence[Effect], own: set[int]) -> list[dict[int, int]]:
    """For every op: how often each tensor that it reads had been changed when it first ran."""
    now: dict[int, int] = {}
    seen = []
    for op in ops:
        seen.append({x: now.get(x, -1) for x in (*op.reads, *op.mutates) if x in own})
        now.update(dict.fromkeys(op.writes, 0))
        for x in op.mutates:
            if x in own:
                now[x] += 1
    return seen


def _last_values(ops: Sequence[Effect], own: set[int]) -> dict[int, int]:
    counts = dict.fromkeys(own, 0)
    for op in ops:
        for x in op.mutates:
            if x in own:
                counts[x] += 1
    return counts


def groups(ops: Sequence[Effect]) -> list[list[int]]:
    """Ops that can only be run again together: whoever makes a tensor, changes it, or reads it before its last change, and all
    between them."""
    maker = {x: n for n, op in enumerate(ops) for x in op.writes}
    last = {x: n for n, op in enumerate(ops) for x in op.mutates if x in maker}
    ends = list(range(len(ops)))
    for x, n in last.items():
        ends[maker[x]] = max(ends[maker[x]], n)
    found: list[list[int]] = []
    end = -1
    for n in range(len(ops)):
        if n > end:
            found.append([])
        found[-1].append(n)
        end = max(end, ends[n])
    return found


def lazily(ops: Sequence[Effect], count: int, keep: frozenset[int] = frozenset()) -> list[int]:
    """A backward order that runs ops of the forward again right before they are first needed, except for what is kept."""
    together = groups(ops[:count])
    owner = {x: g for g in together for n in g for x in ops[n].writes}
    order: list[int] = []
    done: set[int] = set()

    def make(x: int) -> None:
        group = owner.get(x)
        if group is None or x in keep or group[0] in done:
            return
        done.add(group[0])
        inside = {y for n in group for y in ops[n].writes}
        for n in group:
            for y in (*ops[n].reads, *ops[n].mutates):
                if y not in inside:
                    make(y)
        order.extend(group)

    for n in range(count, len(ops)):
        for x in ops[n].reads:
            make(x)
        order.append(n)
    return order


class Nest(NamedTuple):
    """Calls first..last of a segment that are a segment of their own in its replay."""

    first: int
    last: int
    inner: tuple[Nest, ...] = ()  # counted from `first`
