"""The nouns of eviction: a storage (bytes with one value) and the op that makes it.

An op that changes a storage in place makes a new `Storage` in the same bytes: the old value becomes one that is not there and
can be computed again, and whoever was recorded as its reader goes on reading the old value (Coop, NeurIPS 2023, calls this
recomputable in-place).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TICK = 1e-12  # seconds


class Maker:
    """An op as it must be run again. `changes`: pairs (old, new) of storages that it changes in place."""

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
        self.payload = payload  # the driver's: an op's number, or a closure
        self.label = label  # the op's name; Coop's groups go by it
        self.outputs: tuple[Storage, ...] = ()
        self.changes: tuple[tuple[Storage, Storage], ...] = ()
        self.scratch = scratch  # bytes of copies that stand for what it changes and must not change twice
        self.ran = 1  # how often, the first run included


class Storage:
    """Bytes with one value, there or evicted."""

    __slots__ = (
        "alive",
        "born",
        "bytes",
        "children",
        "doomed",
        "fresh",
        "is_there",
        "key",
        "last",
        "locks",
        "maker",
        "pinned",
        "place",
        "root",
        "size",
        "spread",
        "times",
    )

    def __init__(self, key: Any, size: int, maker: Maker | None = None) -> None:
        self.key = key
        self.size = size
        self.maker = maker  # None: cannot be computed again
        self.children: dict[Storage, None] = {}  # made by ops that read it
        self.last = 0.0  # the clock at its last use
        self.locks = 0
        self.pinned = maker is None
        self.fresh = False  # made in backward and read by nobody yet
        self.is_there = False
        self.alive = True  # someone outside refers to it
        self.doomed = False  # died while locked
        self.times = 0  # computed again
        self.born = 0  # number in the order of making
        self.root: Any = None  # of its union-find component while it is evicted
        self.spread: tuple[float, float] | None = None  # cached cost of evicted (ancestors, descendants)
        self.bytes: Any = None  # the driver's: the real bytes
        self.place: Any = None  # its piece of the arena

    @property
    def cost(self) -> float:
        """Of the op that makes it."""
        return self.maker.cost if self.maker is not None else 0.0

    @property
    def parents(self) -> tuple[Storage, ...]:
        return self.maker.inputs if self.maker is not None else ()

    def __repr__(self) -> str:
        return f"Storage({self.key}, {self.size} bytes, {'there' if self.is_there else 'evicted'})"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What an op costs, from numbers that a trace and a running op both know: the policy's clock runs by it.

    Costs are whole ticks, so that sums do not depend on the order in which storages happen to die.
    """

    flops: float
    bandwidth: float
    overhead: float

    def cost(self, flops: int, moved: int) -> int:
        return round((self.overhead + max(flops / self.flops, moved / self.bandwidth)) / TICK)
