"""Simulates a recorded step under an eviction policy: recomputation cost, evictions, fragmentation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from holdall.runtime.eviction.pool import Counts, EvictionPool
from holdall.runtime.eviction.storages import Maker, Storage
from holdall.types.trace import Bytes

Key = Hashable


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """An op. Inputs that no op of the program made are always on the device."""

    reads: tuple[Key, ...] = ()
    writes: tuple[tuple[Key, Bytes], ...] = ()
    changes: tuple[Key, ...] = ()  # changed in place
    cost: float = 1.0
    label: str = ""
    backward: bool = False
    pinned: tuple[Key, ...] = ()  # results that are never evicted
    number: int = -1  # the caller's number of this op
    outside: tuple[Key, ...] = ()  # inputs that the program did not make
    alters: tuple[Key, ...] = ()  # tensors changed in place that the program did not make
    scratch: Bytes = 0  # bytes of copies needed when the op is repeated


@dataclass(frozen=True, kw_only=True)
class Free:
    """The last reference to a storage dies."""

    key: Key


Program = Iterable["OpCall | Free"]


@dataclass(frozen=True, kw_only=True)
class Played:
    counts: Counts
    peak: Bytes
    fragmentation: float | None  # mean free share of the arena at requests without a hole; None: no arena or no such

    @property
    def extra(self) -> float:
        """Cost of recomputation."""
        return self.counts.again


class Silent:
    """A driver that only records the peak."""

    def __init__(self) -> None:
        self.peak = 0

    def rerun(self, maker: Maker, consumes: bool) -> None:
        """Nothing to run."""

    def drop(self, storage: Storage) -> None:
        """Nothing to free."""

    def send(self, storage: Storage) -> None:
        """Nothing to copy; the same of those below."""

    sent = fetch = arrive = discard = send


def play(program: Program, make_pool: Callable[[Silent], EvictionPool], *, stop: float | None = None) -> Played:
    """Run a program through a pool. `stop`: give up when recomputation exceeds this cost."""
    driver = Silent()
    pool = make_pool(driver)
    player = Player(pool)
    peak = 0
    for step in program:
        player.step(step)
        peak = max(peak, pool.live)
        if stop is not None and pool.counts.again > stop:
            break
    holes = pool.arena.fragmentation if pool.arena is not None else []
    return Played(counts=pool.counts, peak=peak, fragmentation=sum(holes) / len(holes) if holes else None)


class Player:
    """Feeds a program to a pool; `values`: the current value of every storage that the program made."""

    def __init__(self, pool: EvictionPool) -> None:
        self.pool = pool
        self.values: dict[Key, Storage] = {}

    def step(self, step: OpCall | Free) -> Maker | None:
        if isinstance(step, Free):
            self.pool.release(self.values.pop(step.key))
            return None
        return self.call(step)

    def call(self, op: OpCall) -> Maker:
        if op.alters:
            self.pool.changes_outside(op.alters)
        inputs = self._values(dict.fromkeys((*op.reads, *op.changes)))
        sizes = [size for _, size in op.writes]
        self.pool.prepare(inputs, sizes, op.label)
        for value in self._values(op.changes):
            self.pool.swaps.discard(self.pool, value)
        self.pool.swaps.look_ahead(self.pool, sizes)
        maker = Maker(inputs=tuple(inputs), cost=op.cost, payload=op, label=op.label, scratch=op.scratch)
        made = [Storage(key, size, maker) for key, size in op.writes]
        for s in made:
            if s.key in op.pinned:  # it cannot be recomputed: keep it as long as results computed from it may be needed
                s.pinned, s.maker = True, None
        changes = []
        for key in op.changes:
            old = self.values.get(key)
            if old is not None:
                changes.append((old, Storage(key, old.size, maker)))
        self.ran(op, maker, made, changes)
        self.pool.made(maker, made, changes=changes, backward=op.backward)
        self.pool.reads_outside(maker, op.outside)
        self.values.update({s.key: s for s in (*made, *(new for _, new in changes))})
        return maker

    def ran(self, op: OpCall, maker: Maker, made: Sequence[Storage], changes: Sequence[tuple[Storage, Storage]]) -> None:
        """The op has run; its inputs are still locked."""

    def _values(self, keys: Iterable[Key]) -> list[Storage]:
        return [self.values[key] for key in keys if key in self.values]
