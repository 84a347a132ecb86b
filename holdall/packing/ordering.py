"""Orders of ops with a low peak, in ROAM's way (arXiv 2310.19295): cut where the order is fixed, and order each part alone.

    cut      -> an op that comes before or after every other one in any order: what lies between two of them is a segment
    segment  -> up to `EXACT` ops: the least peak of all orders, by dynamic programming over sets of finished ops
    larger   -> least peak memory first: of the ops that are ready and stay below the peak so far, the one that leaves least;
                else the one that needs least
    windows  -> at last, a few neighbours around the peak are ordered anew, exactly, while that lowers it
    updates  -> as early as their gradients, as late as can be, or as soon as they do not raise the peak

Memory at a cut does not depend on the order, so the segments' best orders are the best order of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from holdall.types.trace import Bytes

EXACT = 12  # ops of a segment for which all orders are looked at
WINDOW = 8  # neighbours that are ordered anew around the peak
MOVES = 40  # of them
GREEDY = 3000  # ops of a segment that is ordered greedily


@dataclass(frozen=True)
class TensorStay:
    """Bytes that an op makes, or that are there (-1), until the last of some ops is done; none of them: to the end."""

    size: Bytes
    maker: int
    after: frozenset[int]


@dataclass(frozen=True)
class OpsToOrder:
    """Ops by number; their numbers are a legal order. `before`: those that must be done before each."""

    before: Sequence[frozenset[int]]
    workspace: Sequence[Bytes]
    stays: Sequence[TensorStay]

    def __len__(self) -> int:
        return len(self.before)

    @cached_property
    def makes(self) -> list[Bytes]:
        """Bytes that each op makes."""
        found = [0] * len(self)
        for stay in self.stays:
            if stay.maker >= 0:
                found[stay.maker] += stay.size
        return found

    @cached_property
    def ends(self) -> list[list[int]]:
        """The stays that each op is one of the last for."""
        found: list[list[int]] = [[] for _ in range(len(self))]
        for number, stay in enumerate(self.stays):
            for op in stay.after:
                found[op].append(number)
        return found

    @cached_property
    def next(self) -> list[list[int]]:
        """The ops that wait for each."""
        found: list[list[int]] = [[] for _ in range(len(self))]
        for op, before in enumerate(self.before):
            for other in before:
                found[other].append(op)
        return found

    def segments(self) -> list[list[int]]:
        """Ops between cuts, in order; a cut is a segment of one."""
        above: list[int] = []  # sets of ops that come before each in any order
        for before in self.before:
            found = 0
            for other in before:
                found |= above[other] | 1 << other
            above.append(found)
        common, cuts = -1, set()
        for op in reversed(range(len(self))):
            if above[op].bit_count() == op and common >> op & 1:
                cuts.add(op)
            common &= above[op]
        segments: list[list[int]] = [[]]
        for op in range(len(self)):
            if op in cuts:
                segments += [[op], []]
            else:
                segments[-1].append(op)
        return [segment for segment in segments if segment]


class Memory:
    """Live bytes while ops run."""

    def __init__(self, ops: OpsToOrder) -> None:
        self._ops = ops
        self._left = [len(stay.after) for stay in ops.stays]
        self.live = sum(stay.size for stay in ops.stays if stay.maker < 0)
        self.peak = self.live

    def needs(self, op: int) -> Bytes:
        """Live bytes while this op runs."""
        return self.live + self._ops.makes[op] + self._ops.workspace[op]

    def leaves(self, op: int) -> Bytes:
        """Live bytes when it is done."""
        freed = sum(self._ops.stays[n].size for n in self._ops.ends[op] if self._left[n] == 1)
        return self.live + self._ops.makes[op] - freed

    def run(self, op: int) -> None:
        self.peak = max(self.peak, self.needs(op))
        self.live = self.leaves(op)
        for number in self._ops.ends[op]:
            self._left[number] -= 1


def peak_of(ops: OpsToOrder, order: Iterable[int]) -> Bytes:
    """The most bytes live while ops run in this order."""
    memory = Memory(ops)
    for op in order:
        memory.run(op)
    return memory.peak


def best_order(ops: OpsToOrder, updates: frozenset[int] = frozenset()) -> list[int]:
    """An order with a low peak: never higher than that of the ops' numbers, nor of updates as early or as late as can be."""
    orders = [list(range(len(ops)))]
    if updates:
        orders += [_listed(ops, updates, early=True), _listed(ops, updates, early=False)]
        orders.append(_while_they_fit(ops, updates, min(peak_of(ops, order) for order in orders)))
    best = min(orders, key=lambda order: peak_of(ops, order))
    best = _by_segments(_renumbered(ops, best), best)
    return _by_windows(_renumbered(ops, best), best)


def _by_segments(ops: OpsToOrder, names: Sequence[int]) -> list[int]:
    """Order the segment with the highest peak, then the next, until one cannot be improved; returns the names of the ops."""
    segments = ops.segments()
    peaks: list[tuple[Bytes, int]] = []
    memory = Memory(ops)
    for number, segment in enumerate(segments):
        memory.peak = 0
        for op in segment:
            memory.run(op)
        heappush(peaks, (-memory.peak, number))
    while peaks:
        peak, number = heappop(peaks)
        better = _improved(ops, segments, number)
        if better is None or better[0] >= -peak:
            break
        segments[number] = better[1]
        heappush(peaks, (-better[0], number))
    return [names[op] for segment in segments for op in segment]


def _by_windows(ops: OpsToOrder, names: Sequence[int]) -> list[int]:
    """Order the ops around the peak anew, a few neighbours at a time, while that lowers it; returns the names of the ops."""
    names = list(names)
    for _ in range(MOVES):
        peak, at = _where(ops)
        order = _around(ops, peak, at)
        if order is None:
            break
        ops, names = _renumbered(ops, order), [names[op] for op in order]
    return names


def _where(ops: OpsToOrder) -> tuple[Bytes, int]:
    """(the peak of the ops by number, the op that has it first)."""
    memory, found = Memory(ops), (0, 0)
    for op in range(len(ops)):
        memory.run(op)
        if memory.peak > found[0]:
            found = (memory.peak, op)
    return found


def _around(ops: OpsToOrder, peak: Bytes, at: int) -> list[int] | None:
    """An order in which the ops around `at` stay below the peak; None: there is none within a window."""
    memory, begin = Memory(ops), max(at - WINDOW + 1, 0)
    for op in range(begin):
        memory.run(op)
    for first in range(begin, at + 1):
        window = range(first, min(first + WINDOW, len(ops)))
        lower, order = _exact(ops, window, memory)
        if lower < peak:
            return [*range(first), *order, *range(window.stop, len(ops))]
        memory.run(first)
    return None


def _improved(ops: OpsToOrder, segments: Sequence[Sequence[int]], number: int) -> tuple[Bytes, list[int]] | None:
    """(peak, order) of one segment; None: it is too large to try."""
    segment = segments[number]
    memory = Memory(ops)
    for earlier in segments[:number]:
        for op in earlier:
            memory.run(op)
    memory.peak = 0
    if len(segment) <= EXACT:
        return _exact(ops, segment, memory)
    return _least_first(ops, segment, memory) if len(segment) <= GREEDY else None


def _exact(ops: OpsToOrder, segment: Sequence[int], memory: Memory) -> tuple[Bytes, list[int]]:
    """The least peak of all orders: the best last op for every set of finished ones."""
    bit = {op: 1 << k for k, op in enumerate(segment)}
    before = [sum(bit[other] for other in ops.before[op] if other in bit) for op in segment]
    stays = {n for op in segment for n in ops.ends[op]}
    first = segment[0]
    ending = [  # (bytes, made by, freed by) as sets of this segment's ops, for stays that can end here
        (stay.size, sum(bit[op] for op in stay.after if op in bit))
        for stay in (ops.stays[n] for n in stays)
        if all(op in bit or op < first for op in stay.after)
    ]
    count = 1 << len(segment)
    live = [memory.live] * count
    for done in range(1, count):
        made = sum(ops.makes[op] for op in segment if bit[op] & done)
        live[done] = memory.live + made - sum(size for size, freed in ending if freed & done == freed)
    best: list[Bytes] = [0] + [-1] * (count - 1)
    last = [-1] * count
    for done in range(count):
        if best[done] < 0:
            continue
        for k, op in enumerate(segment):
            if done >> k & 1 or before[k] & done != before[k]:
                continue
            peak, then = max(best[done], live[done] + ops.makes[op] + ops.workspace[op]), done | 1 << k
            if best[then] < 0 or peak < best[then]:
                best[then], last[then] = peak, k
    order, done = [], count - 1
    while done:
        order.append(segment[last[done]])
        done ^= 1 << last[done]
    return best[count - 1], order[::-1]


def _least_first(ops: OpsToOrder, segment: Sequence[int], memory: Memory) -> tuple[Bytes, list[int]]:
    """Least peak memory first."""
    inside = set(segment)
    waits = {op: len(ops.before[op] & inside) for op in segment}
    ready = {op for op in segment if not waits[op]}
    order: list[int] = []
    while ready:
        low = [op for op in ready if memory.needs(op) <= memory.peak]
        rank: Callable[[int], tuple[Bytes, int]]
        rank = (lambda op: (memory.leaves(op), op)) if low else (lambda op: (memory.needs(op), op))
        chosen = min(low or ready, key=rank)
        ready.remove(chosen)
        memory.run(chosen)
        order.append(chosen)
        for op in ops.next[chosen]:
            if op in inside:
                waits[op] -= 1
                if not waits[op]:
                    ready.add(op)
    return memory.peak, order


def _listed(ops: OpsToOrder, updates: frozenset[int], *, early: bool) -> list[int]:
    """The ops in order, but updates as soon as they are ready, or after all others that are."""
    waits = [len(before) for before in ops.before]
    ready: list[tuple[bool, int]] = []
    for op, count in enumerate(waits):
        if not count:
            heappush(ready, ((op in updates) != early, op))
    order = []
    while ready:
        _, op = heappop(ready)
        order.append(op)
        for other in ops.next[op]:
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, ((other in updates) != early, other))
    return order


def _while_they_fit(ops: OpsToOrder, updates: frozenset[int], limit: Bytes) -> list[int]:
    """Updates as soon as they stay below a limit; those that never do, in their place."""
    memory, waits = Memory(ops), [len(before) for before in ops.before]
    order: list[int] = []
    waiting: list[int] = []
    done = [False] * len(ops)

    def run(op: int) -> None:
        memory.run(op)
        order.append(op)
        done[op] = True
        for other in ops.next[op]:
            waits[other] -= 1
            if not waits[other] and other in updates:
                waiting.append(other)

    for op in range(len(ops)):
        if done[op]:
            continue
        run(op)
        fitting = [u for u in waiting if not done[u] and memory.needs(u) < limit]
        while fitting:
            run(fitting[0])
            fitting = [u for u in waiting if not done[u] and memory.needs(u) < limit]
        waiting[:] = [u for u in waiting if not done[u]]
    return order


def _renumbered(ops: OpsToOrder, order: Sequence[int]) -> OpsToOrder:
    """The same ops, numbered by their places in an order."""
    place = {op: n for n, op in enumerate(order)}
    place[-1] = -1
    return OpsToOrder(
        [frozenset(place[other] for other in ops.before[op]) for op in order],
        [ops.workspace[op] for op in order],
        [TensorStay(stay.size, place[stay.maker], frozenset(place[op] for op in stay.after)) for stay in ops.stays],
    )
