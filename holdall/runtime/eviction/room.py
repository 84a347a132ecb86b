"""How room is made for an op's results: one storage at a time by score (DTR, MegTaiChi), or a window (Coop)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from holdall.errors import OverBudget
from holdall.runtime.eviction.arena import Arena, Piece, cheapest_window
from holdall.runtime.eviction.scores import Score
from holdall.runtime.eviction.storages import Maker, Storage
from holdall.types.trace import Bytes
from holdall.units import format_bytes

if TYPE_CHECKING:
    from holdall.runtime.eviction.pool import EvictionPool


class EvictionRoom:
    """DTR: counts bytes and ignores addresses.

    `sample`: score about sqrt(n) candidates, found by random strides, skipping those below `small` of the mean size.
    """

    arena: Arena | None = None
    address_of: Callable[[Storage], int | None] = staticmethod(lambda _: None)  # where it lies in real memory, if known
    drops_temporaries = False  # evict storages recomputed on the way to another as soon as possible

    def __init__(self, score: Score, *, sample: bool = False, small: float = 0.01, least: Bytes = 0, seed: int = 0) -> None:
        self.score = score
        self.sample = sample
        self.small = small
        self.least = least  # storages smaller than this are never evicted
        self._random = random.Random(seed)

    def make(self, pool: EvictionPool, sizes: Sequence[Bytes], label: str) -> bool:  # noqa: ARG002
        """Evict until `sizes` fit; returns whether they do."""
        need = sum(sizes)
        if pool.live + need <= pool.budget:
            return True
        while pool.live + need > pool.budget:
            chosen = self.choose(pool)
            if chosen is None:
                return False
            pool.evict(chosen)
        return True

    def choose(self, pool: EvictionPool) -> Storage | None:
        """The candidate with the least score; the last of equals. A score of zero ends the search."""
        best, least = None, math.inf
        for s in self._sampled(pool) if self.sample else pool.candidates:
            value = self.score(pool, s)
            pool.counts.scored += 1
            if value <= least:
                best, least = s, value
                if value == 0:
                    break
        if best is None and self.sample:  # only small ones were sampled
            best = next(iter(pool.candidates), None)
        return best

    def _sampled(self, pool: EvictionPool) -> Iterable[Storage]:
        """Candidates at random strides in [1, sqrt(n)], about sqrt(n) of them; tiny ones are skipped."""
        all_of = list(pool.candidates)
        count = len(all_of)
        if count <= 4:
            return all_of
        root = math.isqrt(count)
        threshold = self.small * sum(s.size for s in all_of) / count
        met: list[Storage] = []
        at = self._random.randrange(root)
        while at < count and len(met) <= 2 * root:
            if all_of[at].size >= threshold:
                met.append(all_of[at])
            at += self._random.randint(1, root)
        return met

    def may_go(self, s: Storage) -> bool:
        return s.size >= self.least and s.size > 0

    def place(self, s: Storage, maker: Maker | None) -> None:
        """Give a new storage an address, if the policy has addresses."""

    def leave(self, s: Storage) -> None:
        """The storage is evicted or freed."""

    def expected(self) -> list[tuple[Bytes, Bytes]]:
        """(address, bytes) of the room made for the results of the next op."""
        return []

    def settle(self) -> None:
        """Free the space reserved for an op that it did not use."""

    def restart(self, arena: Bytes) -> None:
        """Begin a new step, with this many bytes for its results."""


class _Addressed(EvictionRoom):
    """Room in an arena. Pieces are reserved before an op runs and assigned to its results."""

    def __init__(
        self,
        score: Score,
        arena: Bytes,
        *,
        tiny: Bytes = 0,
        align: int = 1,
        sample: bool = False,
        least: Bytes = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(score, sample=sample, least=least, seed=seed)
        self.arena: Arena = Arena(arena, align=align)
        self.tiny = tiny  # storages up to this size are outside the arena and never evicted
        self._aside: list[Piece] = []

    def make(self, pool: EvictionPool, sizes: Sequence[Bytes], label: str) -> bool:
        self.settle()
        for size in sizes:
            if not self._has_address(size):
                continue
            if self.arena.largest() < self.arena.rounded(size):
                self.arena.note_miss()
                if not self._clear(pool, self.arena.rounded(size)):
                    return False
            piece = self.arena.take(_ASIDE, size, where=self._side(label))
            assert piece is not None, "the reserved piece is missing"
            self._aside.append(piece)
        need = sum(sizes)
        while pool.live + need > pool.budget:
            chosen = self.choose(pool)
            if chosen is None:
                return False
            pool.evict(chosen)
        return True

    def _clear(self, pool: EvictionPool, size: Bytes) -> bool:
        """Evict until there is a hole of `size`; returns whether there is."""
        while self.arena.largest() < size:
            chosen = self.choose(pool)
            if chosen is None:
                return False
            pool.evict(chosen)
        return True

    def _side(self, label: str) -> str:  # noqa: ARG002
        return "best"

    def _has_address(self, size: Bytes) -> bool:
        return size > self.tiny

    def may_go(self, s: Storage) -> bool:
        return super().may_go(s) and self._has_address(s.size)

    def place(self, s: Storage, maker: Maker | None) -> None:
        if not self._has_address(s.size):
            return
        size, at = self.arena.rounded(s.size), self.address_of(s)
        fitting = [p for p in self._aside if p.size == size]
        piece = next((p for p in fitting if p.start == at), fitting[0] if fitting else None)
        if piece is not None:
            self._aside.remove(piece)
        else:  # nothing was reserved for it
            piece = self.arena.take(s, size, where=self._side(maker.label if maker is not None else ""))
        if piece is not None:
            piece.owner, s.place = s, piece

    def leave(self, s: Storage) -> None:
        if s.place is not None:
            self.arena.give(s.place)
            s.place = None

    def expected(self) -> list[tuple[Bytes, Bytes]]:
        return [(piece.start, piece.size) for piece in self._aside]

    def settle(self) -> None:
        for piece in self._aside:
            self.arena.give(piece)
        self._aside = []

    def restart(self, arena: Bytes) -> None:
        self.settle()
        seen = self.arena.fragmentation
        self.arena = Arena(arena, align=self.arena.align)
        self.arena.fragmentation = seen


class Holes(_Addressed):
    """MegTaiChi, and DTR on the same arena: evict one storage at a time until a hole is large enough."""


class Windows(_Addressed):
    """Coop: evict the cheapest run of adjacent storages at once; place cheap and expensive results at different ends."""

    drops_temporaries = True

    def _clear(self, pool: EvictionPool, size: Bytes) -> bool:
        def cost(piece: Piece) -> float | None:
            if piece.owner is None:
                return 0.0
            if piece.owner not in pool.candidates:
                return None
            pool.counts.scored += 1
            return self.score(pool, piece.owner)

        window = cheapest_window(list(self.arena), size, cost)
        if window is None:
            return False
        for owner in [p.owner for p in window.pieces if p.owner is not None]:
            pool.evict(owner)
        return True

    def _side(self, label: str) -> str:
        return "left" if is_expensive(label) else "right"


class Knapsack(EvictionRoom):
    """DELTA's later form: one choice of all storages to release, as a 0/1 knapsack of those to keep."""

    def make(self, pool: EvictionPool, sizes: Sequence[Bytes], label: str) -> bool:
        missing = pool.live + sum(sizes) - pool.budget
        if missing > 0:
            there = list(pool.candidates)
            pool.counts.scored += len(there)
            values = [self.score(pool, s) * s.size for s in there]
            for n in release(values, [s.size for s in there], missing):
                if there[n] in pool.candidates:
                    pool.evict(there[n])
        return super().make(pool, sizes, label)


def release(values: Sequence[float], sizes: Sequence[Bytes], needed: Bytes) -> list[int]:
    """Positions of the items to release so that at least `needed` bytes are free; the value of the rest is at least half of
    the largest possible.

    Greedy by value per byte, against the single most valuable item that can stay.
    """
    room = sum(sizes) - needed
    kept: list[int] = []
    left = room
    for n in sorted(range(len(sizes)), key=lambda n: -values[n] / sizes[n]):
        if sizes[n] <= left:
            kept.append(n)
            left -= sizes[n]
    single = max((n for n in range(len(sizes)) if sizes[n] <= room), key=lambda n: values[n], default=None)
    if single is not None and values[single] > sum(values[n] for n in kept):
        kept = [single]
    stay = set(kept)
    return [n for n in range(len(sizes)) if n not in stay]


def refusal(pool: EvictionPool, size: Bytes, label: str) -> OverBudget:
    """The error where nothing is left to evict."""
    held = sorted(pool.present, key=lambda s: -s.size)[:3]
    largest = ", ".join(f"{format_bytes(s.size)} ({_what(s)})" for s in held)
    return OverBudget(
        f"`{label or 'an op'}` needs {format_bytes(size)} beside {format_bytes(pool.live)} that cannot be evicted, over "
        f"the budget of {format_bytes(pool.budget)}; of these {format_bytes(pool.there)} were made by the step: {largest}",
        hint="use a larger budget or a smaller batch",
    )


def _what(s: Storage) -> str:
    state = "in use" if s.locks else "pinned" if s.pinned else "evictable"
    return f"{s.maker.label if s.maker is not None and s.maker.label else s.key}, {state}"


_ASIDE = "set aside"
_EXPENSIVE = ("convolution", "conv1d", "conv2d", "conv3d", "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "add_n")
_EXPENSIVE_PREFIXES = ("_scaled_dot_product", "convolution", "mkldnn_rnn", "_grouped_mm")


def is_expensive(label: str) -> bool:
    """Is this op, by its name, one of the few that cost much per byte of result?"""
    name = label.removeprefix("aten.").split(".")[0]
    return name in _EXPENSIVE or name.startswith(_EXPENSIVE_PREFIXES)


_OUTSIDE = 20  # one part in so many of the budget is left to the loop's own tensors between forwards and backwards


def leave_room(pool: EvictionPool) -> None:
    """Before an op of the loop's own (the next batch, an average): what the program no longer refers to goes, as far as the
    device is nearly full."""
    most = pool.budget - pool.budget // _OUTSIDE
    for s in [s for s in pool.candidates if not s.alive] if pool.live > most else []:
        pool.evict(s)
        if pool.live <= most:
            return
