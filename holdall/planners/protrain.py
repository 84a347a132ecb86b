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
from holdall.cost.updates import host_seconds
from holdall.errors import InvalidInput
from holdall.planners._finish import allocator_of, finish, over_budget, with_traced
from holdall.simulator import lower, simulate
from holdall.simulator.curve import Curve, memory_curve
from holdall.types import Action, Block, Outcome, Phase, Plan, Problem, Trace, Unit
from holdall.units import format_bytes, format_seconds

_TRIES = 40  # plans simulated at most
_TICKS = 10**12  # per second: times are whole numbers here, so that sums do not depend on their order, and ties are ties

Ticks = int


@dataclass(frozen=True, kw_only=True)
class ProTrain:
    alpha: float = 1.1  # the paper's allowance for fragmentation, where an allocator fragments: not on a CPU

    name: ClassVar[str] = "protrain"
    paper: ClassVar[str] = "Yang et al. 2024, arXiv 2406.08334"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if not self.alpha >= 1:
            raise InvalidInput(f"`alpha` is {self.alpha}", hint="use 1 or more")
        profile = profile_of(problem)
        chosen = self._choose(problem, profile)
        actions = actions_of(problem, profile, chosen.setting)
        return finish(self, problem, actions, why=_why(problem, profile, chosen), began=began)

    def _choose(self, problem: Problem, profile: Profile) -> Found:
        """The first in the order of modelled time whose whole simulation fits; where none does, the smallest."""
        limit = int(problem.limit(problem.home) / (self.alpha if problem.hardware.device == "cuda" else 1))
        far = problem.hardware.far
        host = problem.limit(far.name) if far is not None else 0
        mapped = map_blocks(profile)
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
                limit = tried.peak - max(1, missing.get(problem.home, 0))
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
    """The first `count` in order of those that the models fit into `limit` bytes of the device and `host` of the host's.

    For each choice of the other three only the best n_buffer is looked at: more buffers cost bytes and never time.
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
    backward: Ticks = 0  # computation until its gradients are complete, from where those of the unit before were
    up: Ticks = 0  # its weights to the device
    down: Ticks = 0  # its gradients gathered, and to the host
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
    out: Ticks = 0  # what it holds, to the host
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
    """One step in numbers; sums over units, by n_persist, are made once."""

    chunks: tuple[Chunk, ...]
    stages: tuple[Stage, ...]
    spans: tuple[Span, ...]
    step: int = 0  # highest bytes of the optimizer's step
    rest: Ticks = 0  # computation that belongs to no unit
    when: str = "spill"  # of updates on the host, as in `Place`
    overlap: bool = True  # copies run beside computation
    sums_workspace: bool = False  # all units are updated on the device at once, else one after the other
    blocks: tuple[Block, ...] = ()  # of the stages

    def both(self, compute: Ticks, copies: Ticks) -> Ticks:
        return max(compute, copies) if self.overlap else compute + copies

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
        for n_persist, nbytes in enumerate(self._profile.host_bytes):
            counts = range(len(self._profile.chunks) - n_persist + 1)
            fitting = bisect_right(counts, limit, key=lambda n: self.peak(n_persist, n))
            if fitting and nbytes + self._swapped.nbytes <= host:
                least = self.ticks(n_persist, fitting - 1)
                fewest = bisect_left(counts[:fitting], -least, key=lambda n: -self.ticks(n_persist, n))
                yield self.found(n_persist, fewest)

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
        if profile.when == "spill":
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


# from a trace to numbers


def profile_of(problem: Problem) -> Profile:
    """The untouched step in numbers. Without units that may be placed, only blocks are decided."""
    trace, hardware = problem.trace, problem.hardware
    curve = memory_curve(problem, with_traced(problem, []))
    end = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
    blocks = [b for b in trace.blocks if b.backward is not None and b.saves and (_dropped(problem, b) or _moved(problem, b))]
    units = trace.units if "place" in problem.allow and hardware.far is not None else ()
    ready = [max((k for g in u.grads for k in trace.uses(g) if k < end), default=-1) for u in units]
    forward, backward, rest = _computation(trace, units, ready, end)
    return Profile(
        chunks=tuple(_chunks(problem, units, blocks, forward, backward)),
        stages=tuple(_stages(problem, units, blocks, curve, end)),
        spans=tuple(_spans(curve, blocks, ready, end)),
        step=max(curve.high[end:], default=0),
        rest=rest,
        when=_when(problem),
        overlap=hardware.overlap,
        sums_workspace=hardware.device == "cuda" and trace.about.get("precision") is None,
        blocks=tuple(blocks),
    )


def _when(problem: Problem) -> str:
    if not problem.hardware.overlap:
        return "step"
    return "spill" if problem.clips or problem.accumulate > 1 else "backward"


def _computation(trace: Trace, units: Sequence[Unit], ready: Sequence[int], end: int) -> tuple[list[Ticks], list[Ticks], Ticks]:
    """Every op's time under one unit: the last one to be used in forward, the next one to be complete in backward."""
    first = [min((k for x in u.weights for k in trace.uses(x)), default=end) for u in units]
    complete = sorted((k, n) for n, k in enumerate(ready))
    forward, backward, rest = [0] * len(units), [0] * len(units), 0
    for op in trace.ops[:end]:
        ticks = _ticks(op.seconds)
        if op.site.phase is Phase.FORWARD:
            n = bisect_right(first, op.id) - 1
            if n >= 0:
                forward[n] += ticks
                continue
        else:
            at = bisect_left(complete, (op.id, -1))
            if at < len(complete):
                backward[complete[at][1]] += ticks
                continue
        rest += ticks
    return forward, backward, rest


def _chunks(
    problem: Problem, units: Sequence[Unit], blocks: Sequence[Block], forward: Sequence[Ticks], backward: Sequence[Ticks]
) -> Iterator[Chunk]:
    trace, hardware, far = problem.trace, problem.hardware, problem.hardware.far
    if not units or far is None:
        return
    used, can_stream = users(trace), streamable(trace)
    stage_of = {block.id: n for n, block in enumerate(blocks)}
    plain, placed = lower(problem, with_traced(problem, [])), lower(problem, [Place.all(trace, update="host")])
    for n, unit in enumerate(units):
        weights = sum(placed.info(x).nbytes for x in unit.weights)
        grads, states = _nbytes(trace, unit.grads), _nbytes(trace, unit.states)
        homes = 0 if trace.about.get("precision") is not None else weights
        handling = 3 * grads / hardware.bandwidth + 3 * hardware.overhead  # norms taken, gradients gathered
        yield Chunk(
            weights=weights,
            padding=weights - sum(plain.info(x).nbytes for x in unit.weights),
            grads=grads,
            states=states,
            host=states + homes + (weights if grads else 0),
            workspace=unit.workspace,
            streams=unit.name in can_stream,
            forward=forward[n],
            backward=backward[n],
            up=_ticks(copy_seconds(weights, far, hardware, IN)),
            down=_ticks(copy_seconds(grads, far, hardware, OUT) + handling) if grads else 0,
            on_device=_ticks(unit.moved / hardware.bandwidth + 8 * hardware.overhead) if unit.numel else 0,
            on_host=_ticks(host_seconds(unit, trace, hardware)),
            stage=next((stage_of[b.id] for b in used[unit.name] if b.id in stage_of), -1),
        )


def _stages(problem: Problem, units: Sequence[Unit], blocks: Sequence[Block], curve: Curve, end: int) -> Iterator[Stage]:
    trace, hardware, far = problem.trace, problem.hardware, problem.hardware.far
    used = users(trace)
    chunk_of = {block.id: n for n in reversed(range(len(units))) for block in used[units[n].name]}
    begins = sorted(b.backward + 1 for b in blocks if b.backward is not None)
    for block in blocks:
        assert block.backward is not None
        until = next((k for k in begins if k > block.backward + 1), end)
        again = max((trace.saves[i].packed for i in block.saves), default=block.last)
        moved = _nbytes(trace, _moved(problem, block))
        inside = range(block.first, block.last + 1)
        yield Stage(
            forward=_between(trace, block.first, block.last + 1),
            backward=_between(trace, block.backward + 1, until),
            again=_between(trace, block.first, min(again, block.last) + 1),
            out=_ticks(copy_seconds(moved, far, hardware, OUT)) if far is not None else 0,
            back=_ticks(copy_seconds(moved, far, hardware, IN)) if far is not None else 0,
            dropped=_dropped(problem, block),
            moved=moved,
            rise=max(curve.high[k] for k in inside) - curve.before[block.first],
            chunk=chunk_of.get(block.id, -1),
        )


def _spans(curve: Curve, blocks: Sequence[Block], ready: Sequence[int], end: int) -> Iterator[Span]:
    """`ready`: the op after which the gradients of each unit are complete."""
    inside_from = {b.last + 1: n + 1 for n, b in enumerate(blocks)}
    inside_from.update({b.first: n for n, b in enumerate(blocks)})
    replays_from = {b.backward + 1: n for n, b in enumerate(blocks) if b.backward is not None}
    inside, done, start = 0, len(ready), 0
    replays = False
    for k in range(end + 1):
        now = replays_from.get(k, inside_from.get(k, inside))
        finished = done
        while finished and ready[finished - 1] < k:
            finished -= 1
        if k == end or (now, finished) != (inside, done) or k in replays_from:
            if k > start:
                high = max(curve.high[start:k])
                yield Span(high=high, before=curve.before[start], inside=inside, done=done, replays=replays)
            inside, done, start, replays = now, finished, k, k in replays_from


def _dropped(problem: Problem, block: Block) -> int:
    """Bytes that the block makes and only its saves hold, less inputs that are held for it; 0: it cannot be run again."""
    trace = problem.trace
    if "recompute" not in problem.allow or obstacle(trace, [block]):
        return 0
    own = {id(trace.saves[i]) for i in block.saves}
    freed = [x for x in _inside(trace, block) if all(id(save) in own for save in trace.saves_of(x))]
    held = [x for x in dict.fromkeys(block.inputs) if -1 < _end(trace, x) < (block.backward or 0)]
    return max(0, _nbytes(trace, freed) - _nbytes(trace, held))


def _end(trace: Trace, tensor: int) -> int:
    """The op after which a tensor that the step makes is gone; -1: it was there before."""
    born, last = trace.lifetime(tensor)
    return -1 if born < 0 else len(trace.ops) if last is None else last


def _moved(problem: Problem, block: Block) -> list[int]:
    """What `offload` takes away."""
    if "offload" not in problem.allow or problem.hardware.far is None:
        return []
    trace = problem.trace
    saved = {trace.saves[i].tensor for i in block.saves}
    inputs = [block.inputs[n] for n in own_inputs(trace, block)]
    return list(dict.fromkeys([*_inside(trace, block), *(x for x in inputs if x in saved)]))


def _inside(trace: Trace, block: Block) -> list[int]:
    """Tensors that the block made and saved, its outputs left out."""
    saved = dict.fromkeys(trace.saves[i].tensor for i in block.saves)
    return [x for x in saved if block.first <= trace.tensors[x].born <= block.last and x not in block.outputs]


# from a setting to actions


def actions_of(problem: Problem, profile: Profile, setting: Setting) -> list[Action]:
    trace = problem.trace
    actions: list[Action] = []
    decided = modes(len(profile.stages), setting.n_swap, setting.n_ckpt)
    for block, stage, mode in zip(profile.blocks, profile.stages, decided, strict=True):
        if mode == "ckpt" and stage.dropped:
            actions.append(Recompute.of(trace, [block]))
        elif mode == "swap" and stage.moved:
            actions.append(Offload.of(trace, block, overlap=profile.overlap))
    count, is_narrow = len(profile.chunks), trace.about.get("precision") is not None
    rows = {}
    for n, (unit, chunk) in enumerate(zip(trace.units[:count], profile.chunks, strict=True)):
        persists = n < setting.n_persist
        if not persists or (is_narrow and not unit.numel):  # the wide copy of frozen weights is of no use on the device
            stays = persists or n >= count - setting.n_buffer or not chunk.streams
            rows[unit.name] = ("resident" if stays else "streamed", "host")
    if rows:
        when = profile.when if setting.n_persist < count else "step"
        actions.append(Place.of(trace, rows, when=when, share=problem.accumulate == 1))
    return actions


def _simulated(problem: Problem, profile: Profile, setting: Setting) -> Outcome:
    allocator = allocator_of(problem)
    return simulate(problem, with_traced(problem, actions_of(problem, profile, setting)), allocator=allocator)


def _smallest(problem: Problem, profile: Profile, mapped: Sequence[Mapped]) -> Found:
    """Of the few that the model finds smallest, with all units on the host and with none, the one that misses least."""
    found = []
    for n_persist in dict.fromkeys((0, len(profile.chunks))):
        found += nsmallest(3, (m.found(n_persist, 0) for m in mapped), key=lambda f: (f.peak, f.order))

    def miss(f: Found) -> tuple[int, int]:
        outcome = _simulated(problem, profile, f.setting)
        return sum(over_budget(problem, outcome).values()), outcome.peak[problem.home]

    return min(found, key=miss)


def _why(problem: Problem, profile: Profile, chosen: Found) -> list[str]:
    n_persist, n_buffer, n_swap, n_ckpt = chosen.setting
    units, blocks = len(profile.chunks), len(profile.stages)
    expected = f"expects {format_bytes(chosen.peak)} and {format_seconds(chosen.ticks / _TICKS)}"
    if (n_persist, n_swap, n_ckpt) == (units, 0, 0):
        return ["everything fits: nothing needs to be done", f"the paper's model {expected}"]
    return [
        f"{n_persist} of {units} units persist; of the others {n_buffer} keep their weights here (when: {profile.when})",
        f"of {blocks} blocks the first {n_swap} are swapped and {n_ckpt} run again",
        f"the paper's model {expected} of {format_bytes(problem.limit(problem.home))}",
    ]


def _ticks(seconds: float) -> Ticks:
    return round(seconds * _TICKS)


def _between(trace: Trace, start: int, end: int) -> Ticks:
    return sum(_ticks(op.seconds) for op in trace.ops[start:end])


def _nbytes(trace: Trace, tensors: Iterable[int]) -> int:
    return sum(trace.tensors[x].nbytes for x in tensors)


def _sums(values: Iterable[int]) -> list[int]:
    """Of the first n, by n."""
    return [0, *accumulate(values)]


def _suffixes(values: Sequence[int]) -> list[int]:
    """Of all but the first n, by n."""
    return list(accumulate(reversed(values), initial=0))[::-1]
