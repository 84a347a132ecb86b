"""ProTrain's model: what a setting of its four numbers costs in time and bytes, and the settings in the order of their time.

It knows units, blocks and the untouched step as numbers alone; `__init__.py` takes those from a trace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

from holdall.types import Block

Ticks = int  # of time, as whole numbers: sums do not depend on their order, and ties are ties


class Setting(NamedTuple):
    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int


class Found(NamedTuple):
    ticks: Ticks
    peak: int
    setting: Setting

    @property
    def order(self) -> tuple[int, ...]:
        """Least time; of equals the one that does least to blocks, then the one that keeps most states on the device."""
        n_persist, n_buffer, n_swap, n_ckpt = self.setting
        return self.ticks, n_swap, n_ckpt, -n_persist, n_buffer


def search(mapped: Iterable[Mapped], limit: int, *, host: int = 2**62, count: int = 1) -> list[Found]:
    """The first `count` in order of those that the models fit into `limit` bytes of the device and `host` of the host's.

    For each choice of the other three only the best n_buffer is looked at: more buffers cost bytes and never time.
    """
    return nsmallest(count, (f for m in mapped for f in m.best(limit, host)), key=lambda f: f.order)


# what the models know: the numbers that the paper's profiler measures, here from the trace and from the untouched step


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChunk:
    """A unit. Bytes and ticks."""

    weights: int  # on the device, where it is not persistent
    padding: int  # of these, what a persistent one does not take
    grads: int
    states: int
    host: int  # in the host's memory, where it is not persistent
    workspace: int  # of its update on the device
    streams: bool  # its weights may come and go
    forward: Ticks  # computation from its first use to the next unit's
    backward: Ticks  # computation until its gradients are complete, from where those of the unit before were
    up: Ticks  # its weights to the device
    down: Ticks  # its gradients gathered, and to the host
    on_device: Ticks  # its update
    on_host: Ticks
    stage: int  # the stage that uses it first; -1: none

    @property
    def is_trained(self) -> bool:
        return self.grads > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStage:
    """A block that holds something for backward."""

    forward: Ticks
    backward: Ticks
    again: Ticks  # running it again
    out: Ticks  # what it holds, to the host
    back: Ticks
    dropped: int  # bytes it does not hold if it is run again; 0: it cannot be
    moved: int  # bytes it does not hold if they are swapped; 0: they cannot be
    rise: int  # highest bytes of its forward, above what was there before it
    chunk: int  # in whose backward it is run again; -1: no unit's


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpan:
    """A stretch of the untouched step, up to where a block begins or ends or a unit's gradients are complete."""

    high: int  # highest bytes
    before: int  # bytes at its beginning
    inside: int  # the stages before this one hold what they hold for backward
    done: int  # the gradients of this chunk and of all later ones are complete
    replays: bool = False  # the backward of stage `inside` begins here


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One step in numbers; sums over units, by n_persist, are made once."""

    chunks: tuple[ParameterChunk, ...]
    stages: tuple[BlockStage, ...]
    spans: tuple[BlockSpan, ...]
    step: int  # highest bytes of the optimizer's step
    rest: Ticks  # computation that belongs to no unit
    when: str = "overlap_forward"  # of updates on the host, as in `Place`
    overlap: bool = True  # copies run beside computation
    sums_workspace: bool = False  # all units are updated on the device at once, else one after the other
    size: int = 0  # bytes of the paper's chunks; 0: a unit each
    bounds: tuple[int, ...] = ()  # numbers of units that whole chunks hold, from none to all; none given: any number
    blocks: tuple[Block, ...] = ()  # of the stages

    def both(self, compute: Ticks, copies: Ticks) -> Ticks:
        return max(compute, copies) if self.overlap else compute + copies

    @cached_property
    def whole(self) -> Sequence[int]:
        """Numbers of units that may be persistent; so many of the last may be hits as are left of all by one of these."""
        return self.bounds or range(len(self.chunks) + 1)

    @property
    def most_swaps(self) -> int:
        """The paper's N_interval as we read it: how many swaps can be over while the blocks after the first compute."""
        if not self.overlap:  # nothing hides any, and each is priced in full
            return len(self.stages) if any(s.moved for s in self.stages) else 0
        out, back = sum(s.forward for s in self.stages[1:]), sum(s.backward for s in self.stages[1:])
        for count, stage in enumerate(self.stages):
            out, back = out - stage.out, back - stage.back
            if not stage.moved or out < 0 or back < 0:
                return count
        return len(self.stages)

    @property
    def most_ckpts(self) -> int:
        return len(self.stages) if any(s.dropped for s in self.stages) else 0

    @cached_property
    def on_device(self) -> list[Ticks]:
        """By n_persist: updates on the device."""
        return _sums(c.on_device for c in self.chunks)

    @cached_property
    def on_host(self) -> list[Ticks]:
        """By n_persist: updates on the host."""
        return _suffixes([c.on_host for c in self.chunks])

    @cached_property
    def host_bytes(self) -> list[int]:
        """By n_persist: what the others take of the host's memory."""
        return _suffixes([c.host for c in self.chunks])

    @cached_property
    def grads_from(self) -> list[int]:
        """By chunk: its gradients and those of all later ones; beyond the last, twice, nothing."""
        return [*_suffixes([c.grads for c in self.chunks]), 0]

    @cached_property
    def workspace(self) -> list[int]:
        """By n_persist: what updates on the device take for themselves."""
        sizes = [c.workspace for c in self.chunks]
        return [0, *(accumulate(sizes) if self.sums_workspace else accumulate(sizes, max))]

    @cached_property
    def _states(self) -> list[int]:
        return _sums(c.states - c.padding for c in self.chunks)

    @cached_property
    def _streamed(self) -> list[int]:
        return _sums(c.weights if c.streams else 0 for c in self.chunks)

    @cached_property
    def _ring(self) -> list[list[int]]:
        """[first][end]: the most that two streamed units, one after the other, take together among those in between."""
        table = []
        for first in range(len(self.chunks) + 1):
            row, most, before = [0] * (first + 1), 0, 0
            for chunk in self.chunks[first:]:
                if chunk.streams:
                    most, before = max(most, before + chunk.weights), chunk.weights
                row.append(most)
            table.append(row)
        return table

    def removed(self, n_persist: int, n_buffer: int) -> int:
        """Bytes of states and weights that the device does not hold, compared to the untouched step."""
        end = len(self.chunks) - n_buffer
        streamed = self._streamed[end] - self._streamed[n_persist] - self._ring[n_persist][end]
        return self._states[-1] - self._states[n_persist] + streamed


# the two models


def modes(count: int, n_swap: int, n_ckpt: int) -> list[str]:
    """What happens to each of so many blocks: the first are swapped; those run again are spread evenly over the rest."""
    rest = count - n_swap
    found = ["swap"] * n_swap + ["keep"] * rest
    for k in range(n_ckpt):
        found[n_swap + (2 * k + 1) * rest // (2 * n_ckpt)] = "ckpt"
    return found


def map_blocks(profile: Profile) -> list[Mapped]:
    """The models for every choice of (n_swap, n_ckpt)."""
    found = []
    for n_swap in range(profile.most_swaps + 1):
        swapped = Swapped(profile, n_swap)
        found += [Mapped(profile, swapped, n) for n in range(min(profile.most_ckpts, len(profile.stages) - n_swap) + 1)]
    return found


class Sums:
    """A time that every unit adds to: one of three, as it is persistent, a hit or a miss."""

    def __init__(self, rows: Sequence[tuple[Ticks, Ticks, Ticks]]) -> None:
        self._persistent, self._hit, self._miss = (_sums(row[kind] for row in rows) for kind in range(3))
        self._count = len(rows)

    def of(self, n_persist: int, n_buffer: int) -> Ticks:
        end = self._count - n_buffer
        return self._persistent[n_persist] + self._miss[end] - self._miss[n_persist] + self._hit[-1] - self._hit[end]


class Swapped:
    """What depends on n_swap alone: copies of units, slower beside swaps; the forward; swaps that nothing hides."""

    def __init__(self, profile: Profile, n_swap: int) -> None:
        self.count = n_swap
        self.nbytes = sum(s.moved for s in profile.stages[:n_swap])
        self.fetch: list[Ticks] = []  # of a miss, for backward
        self.down: list[Ticks] = []
        rows = []
        for chunk in profile.chunks:
            beside = sum(chunk.stage >= 0 and s < n_swap for s in (chunk.stage, chunk.stage + 1))
            up, down = (ticks * (2 + beside) // 2 for ticks in (chunk.up, chunk.down))
            hit = up if chunk.is_trained else 0  # frozen weights that stay are never new
            miss = up if chunk.streams else hit
            rows.append((chunk.forward, profile.both(chunk.forward, hit), profile.both(chunk.forward, miss)))
            self.fetch.append(up if chunk.streams else 0)
            self.down.append(down)
        self.forward = Sums(rows)
        self.spill: Ticks = 0
        for n, stage in enumerate(profile.stages[:n_swap]):  # the next block's forward hides a swap, its backward the return
            after = profile.stages[n + 1] if profile.overlap and n + 1 < len(profile.stages) else None
            self.spill += max(0, stage.out - (after.forward if after else 0))
            self.spill += max(0, stage.back - (after.backward if after else 0))


class Mapped:
    """Time and peak of every (n_persist, n_buffer) under one choice of (n_swap, n_ckpt), each in a few additions."""

    def __init__(self, profile: Profile, swapped: Swapped, n_ckpt: int) -> None:
        self._profile = profile
        self._swapped = swapped
        self._n_ckpt = n_ckpt
        decided = modes(len(profile.stages), swapped.count, n_ckpt)
        self._backward, self._fixed = self._price(decided)
        self._least = self._formula(len(profile.chunks), 0)
        self._tops = self._weigh(decided)

    def best(self, limit: int, host: int) -> Iterator[Found]:
        """For every n_persist that fits: the least time, and the fewest buffers that give it."""
        whole, units = self._profile.whole, len(self._profile.chunks)
        for n_persist in whole:
            nbytes = self._profile.host_bytes[n_persist]
            counts = [units - n for n in reversed(whole) if n >= n_persist]
            fitting = bisect_right(counts, limit, key=lambda n: self.peak(n_persist, n))
            if fitting and nbytes + self._swapped.nbytes <= host:
                least = self.ticks(n_persist, counts[fitting - 1])
                fewest = bisect_left(counts[:fitting], -least, key=lambda n: -self.ticks(n_persist, n))
                yield self.found(n_persist, counts[fewest])

    def found(self, n_persist: int, n_buffer: int) -> Found:
        setting = Setting(n_persist, n_buffer, self._swapped.count, self._n_ckpt)
        return Found(self.ticks(n_persist, n_buffer), self.peak(n_persist, n_buffer), setting)

    # Eqs. 2-7

    def ticks(self, n_persist: int, n_buffer: int) -> Ticks:
        """Never less than with all units on the device.

        The paper's formula may hide an update on the host that the device would have to wait for, and so send states away where
        there is room for them. Memory is given up here only for memory.
        """
        return max(self._formula(n_persist, n_buffer), self._least)

    def _formula(self, n_persist: int, n_buffer: int) -> Ticks:
        profile = self._profile
        forward = self._swapped.forward.of(n_persist, n_buffer)
        backward = self._backward.of(n_persist, n_buffer) + profile.on_device[n_persist]
        on_host = profile.on_host[n_persist]
        if profile.when == "backward":
            return self._fixed + forward + max(backward, on_host)
        if profile.when == "overlap_forward":
            return self._fixed + max(forward, on_host) + backward
        return self._fixed + forward + backward + on_host

    def _price(self, decided: Sequence[str]) -> tuple[Sums, Ticks]:
        """(the backward, what does not depend on the units)."""
        profile, swapped = self._profile, self._swapped
        fixed = profile.rest + swapped.spill
        backward = [chunk.backward for chunk in profile.chunks]
        for stage, mode in zip(profile.stages, decided, strict=True):
            if mode == "ckpt" and stage.dropped and stage.chunk >= 0:
                backward[stage.chunk] += stage.again
            elif mode == "ckpt" and stage.dropped:
                fixed += stage.again
        rows = [
            (compute, profile.both(compute, down), profile.both(compute, fetch + down))
            for compute, fetch, down in zip(backward, swapped.fetch, swapped.down, strict=True)
        ]
        return Sums(rows), fixed

    # Eqs. 8-11

    def peak(self, n_persist: int, n_buffer: int) -> int:
        return self._tops[n_persist] - self._profile.removed(n_persist, n_buffer)

    def _weigh(self, decided: Sequence[str]) -> list[int]:
        """By n_persist: the highest bytes, as if states and weights of all units were on the device."""
        profile = self._profile
        count = len(profile.chunks)
        dropped = [s.dropped if mode == "ckpt" else 0 for s, mode in zip(profile.stages, decided, strict=True)]
        moved = [s.moved if mode == "swap" else 0 for s, mode in zip(profile.stages, decided, strict=True)]
        all_dropped, all_moved = _sums(dropped), _sums(moved)
        lag = 1 if profile.overlap else 0  # a swap is over with the next block's forward, its return begins with its backward
        stays = [0] * (count + 1)  # by `done`: the highest bytes where that unit is persistent
        leaves = [0] * (count + 1)  # and where its gradients have been gathered and are leaving
        for span in profile.spans:
            gone = all_dropped[span.inside] + all_moved[max(0, span.inside - lag)]
            high = span.high
            if span.replays and dropped[span.inside]:
                high = max(high, span.before - dropped[span.inside] + profile.stages[span.inside].rise)
            flat = profile.chunks[span.done].weights if span.done < count and profile.chunks[span.done].is_trained else 0
            stays[span.done] = max(stays[span.done], high - gone)
            leaves[span.done] = max(leaves[span.done], max(high, span.before + flat) - gone)
        grads = profile.grads_from
        away = [most - grads[r + 1] for r, most in enumerate(leaves)]
        most_away = list(accumulate(reversed(away), max))[::-1]  # over units that are not persistent
        most_stays = [0, *accumulate(stays, max)]  # over those that are
        tops = []
        for n in range(count + 1):
            step = profile.step - grads[n] - (profile.workspace[-1] - profile.workspace[n])
            tops.append(max(most_away[n], most_stays[n] - grads[n + 1], step))  # the last gradients go when backward is over
        return tops


def _sums(values: Iterable[int]) -> list[int]:
    """Of the first n, by n."""
    return [0, *accumulate(values)]


def _suffixes(values: Sequence[int]) -> list[int]:
    """Of all but the first n, by n."""
    return list(accumulate(reversed(values), initial=0))[::-1]
