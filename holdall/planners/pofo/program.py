"""Pofo's dynamic program over a chain of stages: segments kept or offloaded, whole or by their input alone.

It works on numbers alone; `__init__.py` describes its state and the rule that drops states, and makes the numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

ROUGH = 30  # slots of the quick first search


class Way(NamedTuple):
    """One way to store bytes for backward. `forward`, `backward`: bytes the stage needs on top of K and the backlog."""

    place: str  # keep, offload
    pinned: int  # bytes added to K
    moved: int = 0  # bytes added to the backlog
    forward: int = 0
    backward: int = 0
    at_once: bool = False  # the copies cannot be hidden
    toll: float = 0.0  # seconds that it costs even when its copies are hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A stage of the chain, as numbers."""

    uf: float
    ub: float
    full: tuple[Way, ...]  # with all its saved tensors
    input: tuple[Way, ...] = ()  # as the first of a recomputed segment, with its input alone
    bare: int = 0  # bytes that its forward needs when it saves nothing
    inner: int = 0  # bytes added to K further inside a segment
    joins: bool = False  # may be in one segment with the stage before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A chain for the program. The last stage always runs once: its backward comes next."""

    nodes: Sequence[Node]
    inside: Callable[
        [int, int], Sequence[tuple[int, float]]
    ]  # backward of a segment s..t: (bytes on top of K, seconds), sorted by bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PofoLink:
    """Bytes per second in both directions. `hidden_by`: later stages that may run before a copy must be done."""

    out: float
    back: float
    hidden_by: int | None = None  # None: any number (the paper); 1: our runtime; 0: nothing overlaps a copy


class PofoSegment(NamedTuple):
    """A decision about stages first..last."""

    first: int
    last: int
    saved: str  # all, input
    place: str  # keep, offload
    out_at_once: bool = False  # the next stage had no room for its copies
    back_at_once: bool = False  # its backward had no room for the fetch
    need: int = 0  # bytes on top of K planned for its backward, if it is recomputed


Path = tuple[Any, ...]  # (segment, earlier path) or (): a linked list, so that states share their past
State = tuple[float, int, float, float, Path]  # seconds, K, D_F, D_B, decisions


def solve(
    costs: Costs, budget: int, link: PofoLink, *, recompute: bool = True, offload: bool = True, slots: int = 500
) -> tuple[float, list[PofoSegment]] | None:
    """The least seconds and the segments, or None if nothing fits. Beyond `slots` states per stage, K is compared in slots."""
    count = len(costs.nodes)
    rough = None
    if slots > ROUGH:  # the quick search bounds the full one
        rough = solve(costs, budget, link, recompute=recompute, offload=offload, slots=ROUGH)
    enough = rough[0] * (1 + 1e-12) if rough else float("inf")
    still = [*accumulate((node.uf + node.ub for node in reversed(costs.nodes)), initial=0.0)][::-1]
    places = {"keep", "offload"} if offload and link.out > 0 and link.back > 0 else {"keep"}
    levels: list[list[State]] = [[] for _ in range(count + 1)]
    levels[0].append((0.0, 0, 0.0, 0.0, ()))
    for at in range(count):
        for state in _front(levels[at], link, slots):
            for to, grown in _grow(costs, budget, link, places, recompute, at, state):
                if grown[0] + still[to] <= enough:
                    levels[to].append(grown)
        levels[at] = []
    ended = [
        (seconds + (0.0 if link.hidden_by is None else d_f / link.out + d_b / link.back), path)
        for seconds, k, d_f, d_b, path in levels[count]
        if k + max(d_f, d_b) <= budget  # at the turn, bytes not yet copied out and bytes to be fetched are the same
    ]
    if not ended:
        return None
    seconds, path = min(ended, key=lambda e: e[0])
    found: list[PofoSegment] = []
    while path:
        found.append(path[0])
        path = path[1]
    return seconds, found[::-1]


def _grow(
    costs: Costs, budget: int, link: PofoLink, places: set[str], recompute: bool, at: int, state: State
) -> Iterator[tuple[int, State]]:
    """Every segment that may begin at stage `at`, as (the stage after it, the state there)."""
    seconds, k, d_f, d_b, path = state
    nodes, hidden = costs.nodes, link.hidden_by
    node = nodes[at]
    for way in node.full:
        if way.place not in places:
            continue
        ahead = pass_stage(d_f, budget - k - way.forward, node.uf, link.out, hidden)
        behind = ahead and pass_stage(d_b, budget - k - way.backward, node.ub, link.back, hidden)
        if ahead and behind:
            then = (PofoSegment(at, at, "all", way.place, way.at_once, way.at_once), _marked(path, ahead[2], behind[2]))
            out, back = _copies(way, link)
            spent = seconds + ahead[0] + behind[0] + out[0] + back[0]
            yield at + 1, (spent, k + way.pinned, ahead[1] + out[1], behind[1] + back[1], then)
    for way in node.input if recompute else ():
        if way.place not in places:
            continue
        spent, pinned, backlog, first, own = seconds, k, d_f, False, way.at_once
        out, back = _copies(way, link)
        for t in range(at, len(nodes) - 1):
            inner = nodes[t]
            if t > at and not inner.joins:
                break
            ahead = pass_stage(backlog, budget - pinned - inner.bare, inner.uf, link.out, hidden)
            if ahead is None:
                break
            spent, backlog = spent + ahead[0], ahead[1]
            if t == at:
                first = ahead[2]
                spent, pinned, backlog = spent + out[0], pinned + way.pinned, backlog + out[1]
            else:
                own = own or ahead[2]
                pinned += inner.inner
            for need, takes in reversed(costs.inside(at, t)):
                behind = pass_stage(d_b, budget - k - need, takes, link.back, hidden)
                if behind is None:
                    continue
                then = (PofoSegment(at, t, "input", way.place, own, way.at_once, need), _marked(path, first, behind[2]))
                yield t + 1, (spent + behind[0] + back[0], pinned, backlog, behind[1] + back[1], then)
                if d_b <= budget - k - need:
                    break  # nothing waited: fewer bytes would only take longer


def pass_stage(
    backlog: float, room: float, seconds: float, rate: float, hidden_by: int | None = None
) -> tuple[float, float, bool] | None:
    """Run a stage of `seconds` next to a backlog: (seconds with waiting, bytes left, whether it waited first).

    `room`: bytes that the stage leaves free for the backlog; None is returned if negative.
    """
    if room < 0:
        return None
    waited = backlog > room
    if waited:
        gone = backlog - room if hidden_by is None else backlog
        total, backlog = seconds + gone / rate, backlog - gone
    else:
        total = seconds
    if backlog:
        backlog = max(0.0, backlog - rate * seconds)
        if backlog and hidden_by is not None:
            total, backlog = total + backlog / rate, 0.0
    return total, backlog, waited


def _copies(way: Way, link: PofoLink) -> tuple[tuple[float, int], tuple[float, int]]:
    """(seconds to wait at once, bytes added to the backlog) for the copy out and back."""
    if way.moved and (way.at_once or link.hidden_by == 0):
        return (way.moved / link.out, 0), (way.moved / link.back, 0)
    return (way.toll, way.moved), (0.0, way.moved)


def _marked(path: Path, out: bool, back: bool) -> Path:
    """The path, with its last segment marked where its copies had to be waited for."""
    if not path or not (out or back):
        return path
    last: PofoSegment = path[0]
    return last._replace(out_at_once=last.out_at_once or out, back_at_once=last.back_at_once or back), path[1]


def _front(states: list[State], link: PofoLink, slots: int) -> list[State]:
    """States that no other dominates. A larger backlog is worth at most the time of copying it."""
    groups: dict[tuple[float, float], list[State]] = {}
    for state in states:
        groups.setdefault((state[2], state[3]), []).append(state)
    fronts: dict[tuple[float, float], tuple[list[float], list[State]]] = {}
    for key, group in groups.items():
        group.sort(key=lambda s: s[:2])
        front: list[State] = []
        for state in group:
            if not front or state[1] < front[-1][1]:
                front.append(state)
        fronts[key] = [s[0] for s in front], front
    kept = []
    for key, (_, front) in fronts.items():
        others = [(_price(other, key, link), *value) for other, value in fronts.items() if other != key]
        kept += [s for s in front if not any(_beaten(s, price, times, by) for price, times, by in others)]
    if len(kept) <= slots:
        return kept
    least = min(kept, key=lambda s: s[1])
    grain = max(1, (max(s[1] for s in kept) - least[1]) // slots)
    merged: dict[tuple[int, ...], State] = {}
    for state in sorted(kept, key=lambda s: s[:4]):
        merged.setdefault((state[1] // grain, int(state[2] // grain), int(state[3] // grain)), state)
    return [least, *(s for s in merged.values() if s is not least)]


def _price(mine: tuple[float, float], other: tuple[float, float], link: PofoLink) -> float:
    """Seconds of waiting after which one backlog equals another."""
    total = 0.0
    for more, less, rate in zip(mine, other, (link.out, link.back), strict=True):
        if more > less:
            total += (more - less if link.hidden_by is None else more) / rate
    return total


def _beaten(state: State, price: float, times: list[float], front: list[State]) -> bool:
    """Is the state dominated? `front`: ever later states with ever smaller K; the last one in time is compared."""
    at = bisect_right(times, state[0] - price)
    return at > 0 and front[at - 1][1] <= state[1]
