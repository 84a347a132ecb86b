"""ProTrain: four numbers describe a policy; every setting is priced by a model, and the fastest that fits is taken.

Yang et al., arXiv 2406.08334. Units (the paper's chunks) in the order of their first use, blocks in theirs:

    n_persist  the first units: weights, gradients, states and update on the device
    n_buffer   the last of the others: updated on the host, their weights stay on the device
    n_swap     the earliest blocks: what they hold for backward waits on the host
    n_ckpt     blocks run again, spread evenly over the rest; all others are kept

In the paper every unit that is not persistent passes through a pool of n_buffer buffers, so that the last n_buffer of them are
still there when backward begins: they save one of two fetches. Our runtime has no such pool. It streams units through a ring of
two, the one in use and the next; what a hit saves is had by leaving the weights where they are. So `n_buffer` counts buffers
that are never handed on, beside that ring, and the traffic of a hit (once up, once down) and of a miss (twice up) is the
paper's. Units that several blocks use cannot be streamed and stay in any case.

The paper lets the host update units during backward. With clipping or accumulation that would not be exact; then the updates
are made beside the next forward, and the model's `max` moves there. Where copies do not overlap, all times add up.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nsmallest
from itertools import accumulate
from typing import ClassVar, NamedTuple

from holdall.actions._place_schedule import users
from holdall.actions.offload import Offload, own_inputs
from holdall.actions.place import Place, streamable
from holdall.actions.recompute import Recompute, obstacle
from holdall.cost.link import IN, OUT, copy_seconds
from holdall.errors import InvalidInput
from holdall.planners._finish import finish, over_budget, with_traced
from holdall.simulator import lower, simulate
from holdall.simulator.curve import Curve, memory_curve
from holdall.types import Action, Block, Outcome, Phase, Plan, Problem, Trace, Unit
from holdall.units import format_bytes, format_seconds

_TRIES = 40  # plans simulated at most
_TICKS = 10**12  # per second: times are whole numbers here, so that sums do not depend on their order, and ties are ties

Ticks = int


@dataclass(frozen=True, kw_only=True)
class ProTrain:
    alpha: float = 1.1  # the paper's allowance for fragmentation; applied where an allocator is (not on a CPU)

    name: ClassVar[str] = "protrain"
    paper: ClassVar[str] = "Yang et al. 2024, arXiv 2406.08334"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if not self.alpha >= 1:
            raise InvalidInput(f"`alpha` is {self.alpha}", hint="use 1 or more")
        profile = profile_of(problem)
        mapped = map_blocks(profile)
        chosen = self._choose(problem, profile, mapped)
        actions = actions_of(problem, profile, chosen.setting)
        return finish(self, problem, actions, why=_why(problem, profile, chosen), began=began)

    def _choose(self, problem: Problem, profile: Profile, mapped: Sequence[Mapped]) -> Found:
        """The first in the order of modelled time whose whole simulation fits; where none does, the smallest."""
        limit = int(problem.limit(problem.home) / (self.alpha if problem.hardware.device == "cuda" else 1))
        far = problem.hardware.far
        host = problem.limit(far.name) if far is not None else 0
        failed: set[Setting] = set()
        for n in range(_TRIES):
            problem.progress("searching", n, _TRIES, "")
            ranked = search(mapped, limit, host=host, count=_TRIES + 1)
            tried = next((f for f in ranked if f.setting not in failed), None)
            if tried is None:
                break
            missing = over_budget(problem, _simulated(problem, profile, tried.setting))
            if not missing:
                return tried
            failed.add(tried.setting)
            if len(ranked) > _TRIES:  # too many to try each: the next must be smaller by what was missing
                limit = tried.peak - missing.get(problem.home, 0)
        return _smallest(problem, profile, mapped)


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
    """The first `count` in order of those that the model fits into `limit` bytes of the device and `host` of the host.

    Of each choice of the other three only the best n_buffer is looked at: more buffers never cost time and always bytes.
    """
    return nsmallest(count, (f for m in mapped for f in m.best(limit, host)), key=lambda f: f.order)


# what the models know: the numbers that the paper's profiler measures, here from the trace and from the untouched step


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A unit. Bytes and ticks."""

    weights: int  # on the device, where it is not persistent
    padding: int = 0  # of these, what a persistent one does not take
    grads: int = 0
    states: int = 0
    host: int = 0  # in the host's memory, where it is not persistent
    workspace: int = 0  # of its update on the device
    streams: bool = True  # its weights may come and go
    forward: Ticks = 0  # computation from its first use to the next unit's
    backward: Ticks = 0  # computation until its gradients are complete, from where those of the unit before it were
    up: Ticks = 0  # its weights to the device
    down: Ticks = 0  # its gradients to the host
    on_device: Ticks = 0  # its update
    on_host: Ticks = 0
    stage: int = -1  # the stage that uses it first; -1: none

    @property
    def is_trained(self) -> bool:
        return self.grads > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A block that holds something for backward."""

    forward: Ticks
    backward: Ticks
    again: Ticks = 0  # running it again
    out: Ticks = 0  # what it holds to the host
    back: Ticks = 0
    dropped: int = 0  # bytes it does not hold if it is run again; 0: it cannot be
    moved: int = 0  # bytes it does not hold if they are swapped; 0: they cannot be
    rise: int = 0  # highest bytes of its forward, above what was there before it
    chunk: int = -1  # in whose backward it is run again; -1: no unit's


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of the untouched step, up to where a block begins or ends or a unit's gradients are complete."""

    high: int  # highest bytes
    before: int  # bytes at its beginning
    inside: int  # the stages before this one hold what they hold for backward
    done: int  # the gradients of this chunk and of all later ones are complete
    replays: bool = False  # the backward of stage `inside` begins here


@dataclass(frozen=True, kw_only=True)
class Profile:
    chunks: tuple[Chunk, ...]
    stages: tuple[Stage, ...]
    spans: tuple[Span, ...]
    step: int = 0  # highest bytes of the optimizer's step
    rest: Ticks = 0  # computation that belongs to no unit
    when: str = "spill"  # of updates on the host, as in `Place`
    overlap: bool = True  # copies run beside computation
    sums_workspace: bool = False  # all units are updated on the device at once, else one after the other
    blocks: tuple[Block, ...] = ()  # of the stages

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
    def _states(self) -> list[int]:
        return _sums(c.states - c.padding for c in self.chunks)

    @cached_property
    def _streamed(self) -> list[int]:
        return _sums(c.weights for c in self.chunks if c.streams) if False else _sums(c.weights * c.streams for c in self.chunks)

    @cached_property
    def _ring(self) -> list[list[int]]:
        """[first][last]: the most that two streamed units, one after the other, take together among those in between."""
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
        until = len(self.chunks) - n_buffer
        streamed = self._streamed[until] - self._streamed[n_persist] - self._ring[n_persist][until]
        return self._states[-1] - self._states[n_persist] + streamed

    @cached_property
    def host_bytes(self) -> list[int]:
        """By n_persist: what the others take of the host's memory."""
        return _suffixes(c.host for c in self.chunks)


def modes(count: int, n_swap: int, n_ckpt: int) -> list[str]:
    """What happens to each of so many blocks: the first are swapped; those run again are spread evenly over the rest."""
    rest = count - n_swap
    found = ["swap"] * n_swap + ["keep"] * rest
    for k in range(n_ckpt):
        found[n_swap + (2 * k + 1) * rest // (2 * n_ckpt)] = "ckpt"
    return found


# the two models


def map_blocks(profile: Profile) -> list[Mapped]:
    """The models for every choice of (n_swap, n_ckpt)."""
    count = len(profile.stages)
    found = []
    for n_swap in range(profile.most_swaps + 1):
        forward = Forward(profile, n_swap)
        found += [Mapped(profile, forward, n) for n in range(min(profile.most_ckpts, count - n_swap) + 1)]
    return found


class Sums:
    """A time that every unit adds to: another one if it is persistent, a hit or a miss."""

    def __init__(self, rows: Sequence[tuple[Ticks, Ticks, Ticks]]) -> None:
        self._persistent, self._hit, self._miss = (_sums(row[kind] for row in rows) for kind in range(3))
        self._count = len(rows)

    def of(self, n_persist: int, n_buffer: int) -> Ticks:
        until = self._count - n_buffer
        missed = self._miss[until] - self._miss[n_persist]
        return self._persistent[n_persist] + missed + self._hit[-1] - self._hit[until]


class Forward:
    """What depends on n_swap alone: copies of units, slower beside swaps, the forward, and swaps that nothing hides."""

    def __init__(self, profile: Profile, n_swap: int) -> None:
        self.n_swap = n_swap
        self.up, self.down = [], []
        rows = []
        for chunk in profile.chunks:
            swaps = sum(0 <= s < n_swap for s in (chunk.stage, chunk.stage + 1)) if chunk.stage >= 0 else 0
            up, down = (t * (2 + swaps) // 2 for t in (chunk.up, chunk.down))
            hit = up if chunk.is_trained else 0  # frozen weights that stay are never new
            miss = up if chunk.streams else hit
            rows.append((chunk.forward, both(profile, chunk.forward, hit), both(profile, chunk.forward, miss)))
            self.up.append(up if chunk.streams else 0)
            self.down.append(down)
        self.sums = Sums(rows)
        self.spill = 0
        for n, stage in enumerate(profile.stages[:n_swap]):  # the next block's forward hides a swap, its backward the return
            after = profile.stages[n + 1] if profile.overlap and n + 1 < len(profile.stages) else None
            self.spill += max(0, stage.out - (after.forward if after else 0))
            self.spill += max(0, stage.back - (after.backward if after else 0))


def both(profile: Profile, compute: Ticks, copies: Ticks) -> Ticks:
    return max(compute, copies) if profile.overlap else compute + copies


class Mapped:
    """Time and peak of every (n_persist, n_buffer) under one choice of (n_swap, n_ckpt), each in a few additions."""

    def __init__(self, profile: Profile, forward: Forward, n_ckpt: int) -> None:
        self._profile = profile
        self._forward = forward
        self._n_ckpt = n_ckpt
        decided = modes(len(profile.stages), forward.n_swap, n_ckpt)
        self._backward, self._fixed = self._time(decided)
        self._tops = self._memory(decided)

    def best(self, limit: int, host: int) -> Iterator[Found]:
        """For every n_persist that fits, the least time, with the fewest buffers that give it."""
        most = len(self._profile.chunks)
        swapped = sum(s.moved for s in self._profile.stages[: self._forward.n_swap])
        for n_persist in range(most + 1):
            if self._profile.host_bytes[n_persist] + swapped > host:
                continue
            counts = range(most - n_persist + 1)
            fitting = bisect_right(counts, limit, key=lambda n, p=n_persist: self.peak(p, n))  # type: ignore[misc]
            if fitting:
                ticks = self.ticks(n_persist, fitting - 1)
                n = bisect_left(counts[:fitting], -ticks, key=lambda n, p=n_persist: -self.ticks(p, n))  # type: ignore[misc]
                yield self.found(n_persist, n)

    def found(self, n_persist: int, n_buffer: int) -> Found:
        setting = Setting(n_persist, n_buffer, self._forward.n_swap, self._n_ckpt)
        return Found(self.ticks(n_persist, n_buffer), self.peak(n_persist, n_buffer), setting)

    # Eqs. 2-7

    def ticks(self, n_persist: int, n_buffer: int) -> Ticks:
        profile = self._profile
        forward = self._forward.sums.of(n_persist, n_buffer)
        backward = self._backward.of(n_persist, n_buffer) + sum_to(profile.on_device, n_persist)
        raise NotImplementedError
