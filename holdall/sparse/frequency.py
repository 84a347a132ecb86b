"""A cache that keeps what is used most, after MoESys (arXiv 2205.10034): counts of uses that fade."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from holdall.errors import InvalidInput


class FrequencyCache:
    """Says which keys lie in `slots` places, and which leave.

    Every use adds one to a key's count, inside the cache or not; every `every` ticks, all counts are multiplied by `decay`.
    When a new key needs a place and all are taken, keys with counts below `threshold` leave; if there are none, the one with
    the lowest, and of equals the one that was used longest ago.
    """

    def __init__(self, slots: int, *, decay: float = 0.5, every: int = 100, threshold: float = 0.0) -> None:
        if slots < 1 or not 0 <= decay <= 1 or every < 1:
            raise InvalidInput(
                f"a cache of {slots} places, whose counts are multiplied by {decay} every {every} ticks",
                hint="use 1 place or more, a decay from 0 to 1, and 1 tick or more",
            )
        self.slots, self.decay, self.every, self.threshold = slots, decay, every, threshold
        self.counts: dict[Hashable, float] = {}
        self.hits = self.misses = 0
        self._inside: dict[Hashable, None] = {}  # the one used longest ago first
        self._ticks = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._inside

    @property
    def keys(self) -> tuple[Hashable, ...]:
        return tuple(self._inside)

    def use(self, key: Hashable) -> list[Hashable]:
        """Count a use, and have the key inside; returns those that leave."""
        self.counts[key] = self.counts.get(key, 0.0) + 1
        if key in self._inside:
            self.hits += 1
            self._inside[key] = self._inside.pop(key)  # now the last
            return []
        self.misses += 1
        return self.admit(key)

    def admit(self, key: Hashable) -> list[Hashable]:
        """Have the key inside without a use, as a prefetch does; returns those that leave."""
        if key in self._inside:
            return []
        leaving: list[Hashable] = []
        if len(self._inside) >= self.slots:
            leaving = [k for k in self._inside if self.counts.get(k, 0.0) < self.threshold]
            leaving = leaving or [min(self._inside, key=lambda k: self.counts.get(k, 0.0))]  # the first of equals
        for one in leaving:
            del self._inside[one]
        self._inside[key] = None
        return leaving

    def drop(self, key: Hashable) -> None:
        self._inside.pop(key, None)

    def tick(self) -> None:
        """A step is over."""
        self._ticks += 1
        if self._ticks % self.every == 0:
            self.counts = {key: count * self.decay for key, count in self.counts.items()}

    def by_use(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Those used most first."""
        return sorted(keys, key=lambda k: -self.counts.get(k, 0.0))
