"""The cache: which storages are on the device, which can be evicted, and how an evicted one is recomputed.

The same pool serves a simulated step and a real one. The driver reports events (`prepare`, `made`, `release`); the pool calls
the driver's `rerun` (run this op again) and `drop` (free these bytes). The clock is the sum of the ops' costs, not wall time,
so a step takes the same decisions in simulation and in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdall.errors import OverBudget
from holdall.runtime.eviction.arena import Arena
from holdall.runtime.eviction.driver import Driver
from holdall.runtime.eviction.room import EvictionRoom, refusal
from holdall.runtime.eviction.scores import Component, join, neighbours, reach
from holdall.runtime.eviction.storages import Maker, Storage
from holdall.runtime.eviction.swapping import NoSwaps
from holdall.types.trace import Bytes
from holdall.units import format_bytes


@dataclass(kw_only=True)
class Counts:
    """Statistics of the policy."""

    evictions: int = 0
    scored: int = 0  # storages scored while choosing
    reruns: int = 0
    useful: float = 0  # cost of ops run for the first time
    again: float = 0  # cost of recomputation
    over: int = 0  # requests that could not be met
    swaps: int = 0  # evictions whose bytes are in the farther tier
    stall: float = 0  # cost of waiting for copies


class EvictionPool:
    def __init__(
        self,
        *,
        budget: Bytes,
        room: EvictionRoom,
        driver: Driver,
        live: Callable[[], Bytes] | None = None,
        outside: Bytes = 0,
        dead: str = "eager",
        keep_trace: bool = False,
        patience: float = math.inf,
        strict: bool = True,
        swaps: NoSwaps | None = None,
    ) -> None:
        self.budget = budget
        self.room = room
        self.driver = driver
        self.clock: float = 0
        self.counts = Counts()
        self.there = 0  # bytes of storages on the device
        self.outside = outside  # bytes in use that the pool does not manage
        self.present: dict[Storage, None] = {}  # storages on the device
        self.candidates: dict[Storage, None] = {}  # can be evicted; in the order of their last unlock
        self.dead = dead
        self.patience = patience  # limit of recomputation per useful work; beyond it the run is thrashing
        self.strict = strict  # raise when nothing can be evicted; otherwise exceed the budget and count it
        self.swaps = swaps if swaps is not None else NoSwaps()
        self._live = live
        self._keeps = keep_trace  # keep the records of storages that cannot be needed again
        self._born = 0
        self._readers: dict[Any, list[Maker]] = {}  # tensor outside the pool -> ops that read it
        needs = getattr(room.score, "needs", frozenset({"components", "spreads"}))
        self._components = "components" in needs
        self._spreads = "spreads" in needs

    @property
    def live(self) -> Bytes:
        return self._live() if self._live is not None else self.outside + self.there

    @property
    def arena(self) -> Arena | None:
        return self.room.arena

    @property
    def evictions(self) -> int:
        return self.counts.evictions

    # a step

    def prepare(self, inputs: Iterable[Storage], sizes: Sequence[Bytes], label: str = "") -> None:
        """Before an op: lock its inputs, recompute evicted ones, and make room for its results."""
        locked = list(inputs)
        self._lock(locked)
        for s in locked:
            if not s.is_there:
                self._bring_back(s)
        self.swaps.read(self, locked)
        self.make_room(sizes, label)

    def made(
        self,
        maker: Maker,
        storages: Sequence[Storage],
        *,
        changes: Sequence[tuple[Storage, Storage]] = (),
        backward: bool = False,
    ) -> None:
        """After an op: add its results, replace the values that it changed, and unlock its inputs."""
        self.clock += maker.cost
        self.counts.useful += maker.cost
        maker.outputs = tuple(storages)
        maker.changes = tuple(changes)
        for s in maker.inputs:
            s.fresh = False
        for s in storages:
            self._enter(s, maker)
            s.fresh = backward
        for old, new in changes:
            self._take_over(old, new)
            self._enter(new, maker)
            new.fresh = False
        self._unlock(maker.inputs)
        for s in (*storages, *(new for _, new in changes)):
            self._offer(s)
        self.room.settle()
        self.swaps.ran(self, maker, storages)

    def failed(self, inputs: Iterable[Storage]) -> None:
        """The op raised: unlock its inputs."""
        self._unlock(inputs)

    def release(self, s: Storage) -> None:
        """The last reference from the program died."""
        s.alive = False
        self.swaps.died(s)
        if self.dead == "ignore":
            return
        if s.locks:
            s.doomed = True
            return
        self._bury(s)

    def fix(self, s: Storage) -> None:
        """Never evict this storage again: recompute it if necessary, and forget how it was made."""
        if not s.is_there:
            s.locks += 1
            self._bring_back(s)
            s.locks -= 1
        self.swaps.settle(self, s)
        self.candidates.pop(s, None)
        s.pinned = True
        maker, s.maker = s.maker, None
        if maker is not None:
            for idle in self._unlink(s, maker):
                self._forget(idle)

    def reads_outside(self, maker: Maker, keys: Iterable[Any]) -> None:
        """The op can be repeated only while these tensors keep their values."""
        for key in keys:
            self._readers.setdefault(key, []).append(maker)

    def changes_outside(self, keys: Iterable[Any]) -> None:
        """These tensors are about to change: keep every storage that was computed from them and may still be needed."""
        for key in keys:
            for maker in self._readers.pop(key, ()):
                for s in (*maker.outputs, *(new for _, new in maker.changes)):
                    if s.maker is maker and (s.alive or s.children):
                        self.fix(s)

    def make_room(self, sizes: Sequence[Bytes], label: str = "") -> None:
        if self.room.make(self, sizes, label):
            return
        self.counts.over += 1
        if self.strict:
            raise refusal(self, sum(sizes), label)

    def give_way(self) -> bool:
        """Evict one storage more than the budget requires, against fragmentation. Returns whether one could be evicted."""
        chosen = self.room.choose(self)
        if chosen is not None:
            self.evict(chosen)
        return chosen is not None

    def evict(self, s: Storage) -> None:
        self.counts.evictions += 1
        if self.swaps.take(self, s):
            self._leave(s)
        else:
            self._go(s)

    def _go(self, s: Storage) -> None:
        """Evict a storage."""
        self._leave(s)
        self._join(s)
        self._stir(s)

    # entering and leaving the cache

    def _enter(self, s: Storage, maker: Maker | None) -> None:
        """The storage is on the device."""
        s.is_there = True
        if s.place is None:
            self.room.place(s, maker)
        self.there += s.size
        self.present[s] = None
        if s.born == 0:  # a recomputed storage keeps the time of its request
            s.last = self.clock
            self._born += 1
            s.born = self._born
            for p in s.parents:
                p.children[s] = None
        if s.root is not None:
            s.root.find().sum -= s.cost
            s.root = None

    def restored(self, s: Storage) -> None:
        """The storage was fetched."""
        self._enter(s, s.maker)
        self._offer(s)
        self.room.settle()

    def _leave(self, s: Storage) -> None:
        self.candidates.pop(s, None)
        s.is_there = False
        self.there -= s.size
        self.present.pop(s, None)
        self.room.leave(s)
        self.driver.drop(s)

    def _take_over(self, old: Storage, new: Storage) -> None:
        """The new value takes the old one's memory; the old one counts as evicted and unreferenced."""
        self.candidates.pop(old, None)
        old.is_there = False
        old.alive = False
        old.doomed = False
        self.there -= old.size
        self.present.pop(old, None)
        new.place, old.place = old.place, None
        self._join(old)
        self._stir(old)

    def _join(self, s: Storage) -> None:
        """Add an evicted storage to the component of its evicted neighbours."""
        if not self._components:
            return
        s.root = Component(s.cost)
        for x in neighbours(s):
            if x.root is not None:
                s.root = join(s.root, x.root)

    def _stir(self, s: Storage) -> None:
        """Invalidate the cached neighbourhood costs around a storage that entered or left."""
        if not self._spreads:
            return
        s.spread = None
        for up in (True, False):
            inside, border = reach(s, up=up)
            for x in (*inside, *border):
                x.spread = None

    def _lock(self, storages: Iterable[Storage]) -> None:
        for s in storages:
            s.last = self.clock
            s.locks += 1
            self.candidates.pop(s, None)

    def _unlock(self, storages: Iterable[Storage]) -> None:
        for s in storages:
            s.locks -= 1
            if s.locks:
                continue
            if s.doomed or (self.room.drops_temporaries and not s.alive and self.dead == "eager"):
                s.doomed = False
                self._bury(s)
            else:
                self._offer(s)

    def _offer(self, s: Storage) -> None:
        """Make the storage a candidate for eviction, unless it is locked or fixed."""
        self.candidates.pop(s, None)
        if s.is_there and not s.pinned and not s.fresh and not s.locks and self.room.may_go(s):
            self.candidates[s] = None

    def _bury(self, s: Storage) -> None:
        """The program no longer refers to the storage: free it if it can be recomputed or cannot be needed."""
        needed = bool(s.children)
        self.swaps.discard(self, s)
        if self.dead == "banish":
            if not any(not c.is_there for c in s.children):
                self._banish(s)
            return
        if s.is_there and (s.maker is not None or not needed):
            if needed or self._keeps:
                self._go(s)
            else:
                self._leave(s)
        if not needed and not self._keeps:
            self._forget(s)

    def _banish(self, s: Storage) -> None:
        """Free a storage for good: results computed from it can no longer be recomputed."""
        if s.is_there:
            self._leave(s)
        for child in s.children:
            child.pinned = True
            self.candidates.pop(child, None)
        s.children.clear()

    def _forget(self, s: Storage) -> None:
        """Drop the record of a storage that cannot be needed again, and of its inputs where the same holds."""
        todo = [s]
        while todo:
            gone = todo.pop()
            if gone.root is not None:
                gone.root.find().sum -= gone.cost
                gone.root = None
            self.swaps.discard(self, gone)
            maker, gone.maker = gone.maker, None
            gone.pinned = True
            if maker is not None:
                todo += self._unlink(gone, maker)

    def _unlink(self, s: Storage, maker: Maker) -> list[Storage]:
        """Remove the storage from its maker's inputs' children; returns the inputs that nothing needs any more."""
        idle = []
        for p in maker.inputs:
            p.children.pop(s, None)
            p.spread = None
            if not p.alive and not p.children and not p.locks:
                if p.is_there:
                    self._leave(p)
                idle.append(p)
        return idle

    # recomputation

    def _bring_back(self, wanted: Storage) -> None:
        """Fetch a storage, or recompute it and everything it needs; with a stack, because chains are long."""
        if self.swaps.fetch(self, wanted):
            return
        stack: list[Maker] = [self._begin(wanted)]
        while stack:
            maker = stack[-1]
            missing = next((s for s in maker.inputs if not s.is_there), None)
            if missing is not None:
                if not self.swaps.fetch(self, missing):
                    stack.append(self._begin(missing))
                continue
            self._again(maker)
            stack.pop()

    def _begin(self, s: Storage) -> Maker:
        assert s.maker is not None, f"{s} is evicted and cannot be recomputed"
        self._lock(s.maker.inputs)
        return s.maker

    def _again(self, maker: Maker) -> None:
        """Run one op again. All its results take memory; those already on the device are freed at once."""
        consumes = all(old.locks == 1 for old, _ in maker.changes)
        self.swaps.read(self, maker.inputs, changed=[old for old, _ in maker.changes] if consumes else ())
        sizes = [s.size for s in maker.outputs]
        if not consumes:
            sizes += [old.size for old, _ in maker.changes]
        if maker.scratch:
            sizes.append(maker.scratch)
        self.make_room(sizes, maker.label)
        maker.ran += 1
        self.counts.reruns += 1
        self.counts.again += maker.cost
        self.driver.rerun(maker, consumes)
        self.clock += maker.cost
        back = [s for s in maker.outputs if wants(s, maker)]
        for old, new in maker.changes:
            if wants(new, maker):
                if consumes:
                    self._take_over(old, new)
                back.append(new)
            elif consumes:  # it was changed on the way to another result
                self._go(old)
        for s in back:
            self._enter(s, maker)
            s.times += 1
            self._stir(s)
        self._unlock(maker.inputs)
        for s in back:
            self._offer(s)
        self.room.settle()
        if self.counts.again > self.patience * max(self.counts.useful, maker.cost):
            raise OverBudget(
                f"thrashing: {self.counts.again / self.counts.useful:.0f} times the step's own work went into recomputation "
                f"within {format_bytes(self.budget)}",
                hint="use a larger budget, or pass the planner a larger `patience=`",
            )


def wants(s: Storage, maker: Maker) -> bool:
    """Keep this result of a repeated op? Yes if it is evicted and may be needed."""
    return not s.is_there and not s.is_away and s.maker is maker
