"""The nouns of eviction: a storage (bytes with one value) and the op that makes it.

An op that changes a storage in place makes a new `Storage` in the same memory: the old value counts as evicted and can be
recomputed, and ops recorded as its readers go on reading the old value (Coop, NeurIPS 2023, calls this recomputable in-place).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TICK = 1e-12  # seconds


class Maker:
    """An op that can be repeated. `changes`: pairs (old, new) of storages that it changes in place."""

    __slots__ = ("changes", "cost", "inputs", "label", "outputs", "payload", "ran", "scratch")

    def __init__(
        self,
        *,
        inputs: tuple[Storage, ...],
        cost: float,
        payload: Any = None,
        label: str = "",
        scratch: int = 0,
    ) -> None:
        self.inputs = inputs  # each once
        self.cost = cost
        self.payload = payload  # for the driver: an op's number, or a closure
        self.label = label  # the op's name; Coop groups by it
        self.outputs: tuple[Storage, ...] = ()
        self.changes: tuple[tuple[Storage, Storage], ...] = ()
        self.scratch = scratch  # bytes of the copies that a repetition changes instead of its inputs
        self.ran = 1  # number of runs, including the first


class Storage:
    """Bytes with one value, on the device or evicted."""

    __slots__ = (
        "alive",
        "born",
        "bytes",
        "children",
        "copied",
        "doomed",
        "due",
        "fresh",
        "is_there",
        "key",
        "last",
        "locks",
        "maker",
        "pinned",
        "place",
        "ready",
        "root",
        "size",
        "spread",
        "ticket",
        "times",
    )

    def __init__(self, key: Any, size: int, maker: Maker | None = None) -> None:
        self.key = key
        self.size = size
        self.maker = maker  # None: cannot be recomputed
        self.children: dict[Storage, None] = {}  # results of ops that read it
        self.last = 0.0  # clock at its last use
        self.locks = 0
        self.pinned = maker is None
        self.fresh = False  # made in backward and not read yet
        self.is_there = False
        self.alive = True  # the program refers to it
        self.doomed = False  # its last reference died while it was locked
        self.times = 0  # number of recomputations
        self.born = 0  # sequence number
        self.root: Any = None  # its union-find component while it is evicted
        self.spread: tuple[float, float] | None = None  # cached cost of evicted (ancestors, descendants)
        self.bytes: Any = None  # for the driver: the real storage
        self.place: Any = None  # its piece of the arena
        self.copied: float | None = None  # clock at which its copy in the farther tier is complete; None: there is none
        self.ready: float | None = None  # clock at which a fetch under way is complete; None: no fetch is
        self.due: tuple[int, float] | None = None  # while it is away: the op that needs it, and the cost of its copy back
        self.ticket: Any = None  # for the driver: that copy

    @property
    def is_away(self) -> bool:
        """Whether its bytes are in the farther tier only."""
        return not self.is_there and self.copied is not None

    @property
    def cost(self) -> float:
        """Cost of the op that makes it."""
        return self.maker.cost if self.maker is not None else 0.0

    @property
    def parents(self) -> tuple[Storage, ...]:
        return self.maker.inputs if self.maker is not None else ()

    def __repr__(self) -> str:
        return f"Storage({self.key}, {self.size} bytes, {'there' if self.is_there else 'evicted'})"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The cost of an op, from numbers known both in a trace and at run time; the policy's clock counts it.

    Costs are whole ticks, so that sums do not depend on the order in which storages die.
    """

    flops: float
    bandwidth: float
    overhead: float

    def cost(self, flops: int, moved: int) -> int:
        return round((self.overhead + max(flops / self.flops, moved / self.bandwidth)) / TICK)
