"""Swaps beside recomputation, as in DELTA (Tang et al., TACO 2024, arXiv 2203.15980).

The *director* decides for every storage that the pool evicts: its bytes are copied to a farther tier, or it is recomputed,
whichever costs less. The *prefetcher* works in both directions: it copies bytes out while the link is idle, so that they can be
freed later without waiting, and it fetches storages a few ops before they are read, into free memory only. It needs to know
what is used when, which the first step records (`recording.py`); in the first step nothing is copied early.

Like the pool's clock, the two lanes of the link count costs, not seconds, so that a run takes the decisions of its simulation.

    there                     copied is None            on the device only
    there, copied             copied: clock             on the device, and a copy is (or will be) in the farther tier
    is_away                   not there, copied         in the farther tier only
    there, copied, ready      ready: clock              fetched; the copy is kept until the storage is read
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdall.runtime.eviction.recording import UseRecord
from holdall.runtime.eviction.scores import component_neighbourhood, reach
from holdall.runtime.eviction.storages import TICK, Maker, Storage
from holdall.types.trace import Bytes

if TYPE_CHECKING:
    from holdall.runtime.eviction.pool import EvictionPool


class NoSwaps:
    """Evicted storages are recomputed; there is no farther tier."""

    def penalty(self, pool: EvictionPool, s: Storage) -> float:  # noqa: ARG002
        """Cost of bringing the storage back if it were evicted now."""
        return component_neighbourhood(s)

    def unused(self, pool: EvictionPool, s: Storage) -> float:
        """How long the storage is not used: since its last use."""
        return pool.clock - s.last

    def take(self, pool: EvictionPool, s: Storage) -> bool:  # noqa: ARG002
        """Decide about a storage that is evicted: True if its bytes are in the farther tier now."""
        return False

    def fetch(self, pool: EvictionPool, s: Storage) -> bool:  # noqa: ARG002
        """Bring a storage back from the farther tier, if it is there."""
        return False

    def read(self, pool: EvictionPool, storages: Iterable[Storage], *, changed: Collection[Storage] = ()) -> None:
        """An op is about to read these storages, and to change some in place."""

    def settle(self, pool: EvictionPool, s: Storage) -> None:
        """The storage stays on the device for good."""

    def discard(self, pool: EvictionPool, s: Storage) -> None:
        """Free the copy of a storage in the farther tier."""

    def look_ahead(self, pool: EvictionPool, sizes: Sequence[Bytes]) -> None:
        """Before an op that will make storages of these sizes: copy early."""

    def ran(self, pool: EvictionPool, maker: Maker, made: Sequence[Storage]) -> None:
        """An op ran for the first time."""

    def died(self, s: Storage) -> None:
        """The program no longer refers to the storage."""

    def close(self, pool: EvictionPool) -> None:
        """Bring everything back: the farther tier is about to close."""

    def end(self) -> None:
        """The step is over; ops of the optimizer are not part of it."""

    def recorded(self) -> UseRecord | None:
        """What the step recorded for the next ones; None: nothing, or it took another course than the recorded one."""
        return None

    def recall(self, record: UseRecord | None) -> None:
        """Use what an earlier step recorded."""


@dataclass(frozen=True, kw_only=True)
class SwapLink:
    """The link to the farther tier, by the pool's clock."""

    out: float  # bytes per second; 0: nothing is swapped
    back: float
    latency: float = 0.0
    room: Bytes = 2**62  # of the farther tier

    def leaving(self, size: Bytes) -> float:
        return _ticks(self.latency, size, self.out)

    def returning(self, size: Bytes) -> float:
        return _ticks(self.latency, size, self.back)


def _ticks(latency: float, size: Bytes, rate: float) -> float:
    return round((latency + size / rate) / TICK) if rate > 0 else math.inf


class Director(NoSwaps):
    """What bringing a storage back would cost, in either way."""

    def __init__(
        self, link: SwapLink, *, director: str = "both", ahead: int = 8, learns: bool = True, outside: Bytes = 0
    ) -> None:
        self.link = link
        self.director = director  # "both"; "swap" and "rerun" always choose the same, as far as they can
        self.ahead = ahead  # ops that a fetch may be ahead of its use
        self.record: UseRecord | None = None
        self.writes = UseRecord() if learns else None
        self.at = 0  # number of the next op
        self.away: dict[int, Storage] = {}  # storages in the farther tier only, by their number
        self.used: Bytes = 0  # of the farther tier
        self._is_over = False
        self._outside = outside  # bytes in use before the step
        self._due: list[tuple[int, float]] = []  # fetches to come: (op that needs it, cost of the copy), in order
        self._out_free = 0.0  # clock at which the lane out is idle
        self._back_free = 0.0

    def swap_cost(self, pool: EvictionPool, s: Storage, *, early: bool = False) -> float:
        """What remains of the copy out, and the part of the copy back that the prefetcher does not hide. `early`: the copy out
        is not waited for."""
        if s.copied is None and self.used + s.size > self.link.room:
            return math.inf
        leaves = 0.0 if early else self._left_at(pool, s) - pool.clock
        return max(0.0, leaves) + self._late(s)

    def _left_at(self, pool: EvictionPool, s: Storage) -> float:
        if s.copied is not None:
            return s.copied
        return max(pool.clock, self._out_free) + self.link.leaving(s.size)

    def _late(self, s: Storage) -> float:
        """The part of the copy back that is not hidden: the prefetcher has the time of a few ops before the next use, and
        shares it with others that are due then."""
        use = self._next_use(s)
        if self.record is None or use is None:
            return self.link.returning(s.size)
        begin = max(self.at, use - self.ahead)
        first, last = bisect_right(self._due, (begin, math.inf)), bisect_right(self._due, (use, math.inf))
        busy = sum(cost for _, cost in self._due[first:last])
        return max(0.0, self.link.returning(s.size) + busy - self.record.until(use, begin))

    def _next_use(self, s: Storage) -> int | None:
        """The next op that reads the storage, or an evicted one that is recomputed from it."""
        if self.record is None:
            return None
        uses = (self.record.next_use(x, self.at) for x in (s, *reach(s, up=False)[0]))
        return min((use for use in uses if use is not None), default=None)

    def _is_unused(self, s: Storage) -> bool:
        """Whether no op of the recorded step reads the storage any more, nor one that is recomputed from it."""
        return self.record is not None and self._next_use(s) is None

    def _swaps(self, pool: EvictionPool, s: Storage, *, early: bool = False) -> bool:
        if self.director == "rerun" or self._is_unused(s):
            return False
        cost = self.swap_cost(pool, s, early=early)
        return cost < math.inf and (self.director == "swap" or cost <= self._again_cost(pool, s))

    def _again_cost(self, pool: EvictionPool, s: Storage) -> float:
        """Of recomputation. A copy under way is waited for before the memory is free."""
        left = max(0.0, s.copied - pool.clock) if s.copied is not None else 0.0
        return component_neighbourhood(s) + left

    def penalty(self, pool: EvictionPool, s: Storage) -> float:
        if self._is_unused(s):
            return self._again_cost(pool, s) - component_neighbourhood(s)
        return self.swap_cost(pool, s) if self._swaps(pool, s) else self._again_cost(pool, s)

    def unused(self, pool: EvictionPool, s: Storage) -> float:
        if self.record is None:
            return pool.clock - s.last
        use = self._next_use(s)
        return self.record.until(use, self.at) if use is not None else math.inf


class Swaps(Director):
    """Carries the director's decisions out, and prefetches."""

    def take(self, pool: EvictionPool, s: Storage) -> bool:
        if not self._swaps(pool, s):
            self.discard(pool, s)
            return False
        if s.ready is not None:
            self._arrive(pool, s)
        self._send(pool, s)
        assert s.copied is not None
        self._wait(pool, s.copied)
        pool.driver.sent(s)
        pool.counts.swaps += 1
        self.away[s.born] = s
        use = self._next_use(s)
        s.due = (use, self.link.returning(s.size)) if use is not None else None
        if s.due is not None:
            insort(self._due, s.due)
        return True

    def _comes(self, s: Storage) -> None:
        """The storage is no longer away."""
        del self.away[s.born]
        if s.due is not None:
            self._due.remove(s.due)

    def _send(self, pool: EvictionPool, s: Storage) -> None:
        """Start the copy out, unless there is one."""
        if s.copied is None:
            s.copied = self._out_free = self._left_at(pool, s)
            self.used += s.size
            pool.driver.send(s)

    def _wait(self, pool: EvictionPool, until: float) -> None:
        if until > pool.clock:
            pool.counts.stall += until - pool.clock
            pool.clock = until

    # coming back

    def fetch(self, pool: EvictionPool, s: Storage) -> bool:
        if not s.is_away:
            return False
        pool.make_room([s.size], "fetch")
        self._fetch(pool, s)
        return True

    def _fetch(self, pool: EvictionPool, s: Storage) -> None:
        self._comes(s)
        s.ready = self._back_free = max(pool.clock, self._back_free, s.copied or 0.0) + self.link.returning(s.size)
        pool.driver.fetch(s)
        pool.restored(s)

    def _arrive(self, pool: EvictionPool, s: Storage) -> None:
        assert s.ready is not None
        self._wait(pool, s.ready)
        s.ready = None
        pool.driver.arrive(s)

    def read(self, pool: EvictionPool, storages: Iterable[Storage], *, changed: Collection[Storage] = ()) -> None:
        for s in storages:
            if s.ready is not None:
                self._arrive(pool, s)
                self.discard(pool, s)
            elif s in changed:
                self.discard(pool, s)

    def settle(self, pool: EvictionPool, s: Storage) -> None:
        if s.ready is not None:
            self._arrive(pool, s)
        self.discard(pool, s)

    def discard(self, pool: EvictionPool, s: Storage) -> None:
        if s.copied is None:
            return
        if s.ready is not None:
            self._arrive(pool, s)
        if s.is_there:  # its memory may be reused or changed
            self._wait(pool, s.copied)
        self.used -= s.size
        if s.is_away:
            self._comes(s)
        pool.driver.discard(s)
        s.copied = None

    # the prefetcher

    def look_ahead(self, pool: EvictionPool, sizes: Sequence[Bytes]) -> None:
        if self.record is not None and self.at < len(self.record.ops) and not self._is_over:
            self._prefetch(pool, self.record, sum(sizes))
            self._send_early(pool, self.record)

    def _prefetch(self, pool: EvictionPool, record: UseRecord, needed: Bytes) -> None:
        """Fetch what the next ops read, as far as it fits beside all that these ops make."""
        if not self.away:
            return
        for op in record.ops[self.at + 1 : self.at + 1 + self.ahead]:
            for number in op.reads:
                s = self.away.get(number)
                if s is not None and pool.live + needed + s.size > pool.budget:
                    return
                if s is not None:
                    self._fetch(pool, s)
            needed += op.makes

    def _send_early(self, pool: EvictionPool, record: UseRecord) -> None:
        """Copy a storage out while the link is idle: the first that the director would swap, of those that the filter will
        evict before the step's largest memory."""
        excess = pool.live + record.growth_from(self.at) - pool.budget
        if self._out_free > pool.clock or excess <= 0:
            return
        for s in sorted(pool.candidates, key=lambda s: self._early_score(pool, s)):
            time = self.link.leaving(s.size) + self.link.returning(s.size)
            if s.copied is None and self.unused(pool, s) >= time and self._swaps(pool, s, early=True):
                self._send(pool, s)
                return
            excess -= s.size
            if excess <= 0:
                return

    def _early_score(self, pool: EvictionPool, s: Storage) -> float:
        below = s.size * self.unused(pool, s)
        if self._is_unused(s) or not below:
            return 0.0 if below else math.inf
        is_swap = self._swaps(pool, s, early=True)
        return (self.swap_cost(pool, s, early=True) if is_swap else component_neighbourhood(s)) / below

    # steps

    def ran(self, pool: EvictionPool, maker: Maker, made: Sequence[Storage]) -> None:  # noqa: ARG002
        if self._is_over:
            return
        if self.writes is not None:
            self.writes.ran(maker, made)
        elif self.record is not None:
            ops = self.record.ops
            if self.at >= len(ops) or ops[self.at].label != maker.label:
                self.record = None
        self.at += 1

    def died(self, s: Storage) -> None:
        if self.writes is not None and not self._is_over:
            self.writes.died(s)

    def close(self, pool: EvictionPool) -> None:
        for s in list(self.away.values()):
            pool.fix(s)
        for s in list(pool.present):
            self.settle(pool, s)

    def end(self) -> None:
        self._is_over = True

    def recorded(self) -> UseRecord | None:
        return self.writes if self.writes is not None else self.record

    def recall(self, record: UseRecord | None) -> None:
        if record is not None:
            self.record, self.writes = record, None
