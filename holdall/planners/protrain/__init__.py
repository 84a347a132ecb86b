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

Units are decided about by chunks: those that share one persist together and hit together. On a GPU the size of chunks is the
paper's, of a grid the one with the least slack (`chunks.py`). What slack costs the paper, room in buffers of one size, costs
nothing here: the runtime moves units, each in memory of its own size. So the size decides which units go together and nothing
else, and `chunk=0`, which decides about each, is never worse in the model. The grid is meant for models of gigabytes; on a CPU
each unit is decided about.

The paper lets the host update units during backward. With clipping or accumulation that would not be exact; then the updates
are made beside the next forward, and the model's `max` moves there. Where copies do not overlap, all times add up.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import ClassVar

from holdall.actions.offload import Offload, own_inputs
from holdall.actions.place import Place, streamable
from holdall.actions.place.schedule import users
from holdall.actions.recompute import Recompute, obstacle
from holdall.cost.link import copy_seconds
from holdall.cost.updates import host_seconds
from holdall.errors import InvalidInput
from holdall.planners.protrain.chunks import boundaries, chunk_size
from holdall.planners.protrain.model import (
    BlockSpan,
    BlockStage,
    Found,
    Mapped,
    ParameterChunk,
    Profile,
    Setting,
    Ticks,
    map_blocks,
    modes,
    search,
)
from holdall.planning.finish import NEVER, finish, outcome_or_never, over_budget, with_traced
from holdall.simulator import lower
from holdall.simulator.curve import MemoryCurve, memory_curve
from holdall.types import Action, Block, Outcome, Phase, Plan, Problem, Trace, Unit
from holdall.units import format_bytes, format_seconds

_TRIES = 40  # plans simulated at most
_TICKS = 10**12  # per second


@dataclass(frozen=True, kw_only=True)
class ProTrain:
    alpha: float = 1.1  # the paper's allowance for fragmentation, where an allocator fragments: not on a CPU
    chunk: int | None = None  # bytes of a chunk; 0: a unit each; None: of the paper's grid by the least slack, on a CPU 0

    name: ClassVar[str] = "protrain"
    paper: ClassVar[str] = "Yang et al. 2024, arXiv 2406.08334"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if not self.alpha >= 1:
            raise InvalidInput(f"`alpha` is {self.alpha}", hint="use 1 or more")
        if self.chunk is not None and self.chunk < 0:
            raise InvalidInput(f"`chunk` is {self.chunk} bytes", hint="use 1 or more, 0 for units, or leave it out")
        profile = profile_of(problem, self.chunk)
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
                more = missing.get(problem.home, 0)
                limit = tried.peak - max(1, more if more < NEVER // 2 else 0)
        return _smallest(problem, profile, mapped)


def profile_of(problem: Problem, chunk: int | None = None) -> Profile:
    """The untouched step in numbers, `chunk` as in `ProTrain`. Without units that may be placed, only blocks are decided."""
    trace, hardware = problem.trace, problem.hardware
    curve = memory_curve(problem, with_traced(problem, []))
    end = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
    blocks = [b for b in trace.blocks if b.backward is not None and b.saves and (_dropped(problem, b) or _moved(problem, b))]
    units = trace.units if problem.permits(Place) and hardware.far is not None else ()
    ready = [max((k for g in u.grads for k in trace.uses(g) if k < end), default=-1) for u in units]
    forward, backward, rest = _computation(trace, units, ready, end)
    params = [[trace.tensors[x].nbytes for x in u.weights] for u in units]
    if chunk is None:
        chunk = chunk_size(params) if hardware.device == "cuda" else 0
    return Profile(
        chunks=tuple(_chunks(problem, units, blocks, forward, backward)),
        stages=tuple(_stages(problem, units, blocks, curve, end)),
        spans=tuple(_spans(curve, blocks, ready, end)),
        step=max(curve.high[end:], default=0),
        rest=rest,
        when=_when(problem),
        overlap=hardware.overlap,
        sums_workspace=hardware.device == "cuda" and trace.about.precision is None,
        size=chunk,
        bounds=boundaries(params, chunk),
        blocks=tuple(blocks),
    )


def _when(problem: Problem) -> str:
    if not problem.hardware.overlap:
        return "step"
    return "overlap_forward" if problem.reads_gradients or problem.accumulate > 1 else "backward"


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
) -> Iterator[ParameterChunk]:
    trace, hardware, far = problem.trace, problem.hardware, problem.hardware.far
    if not units or far is None:
        return
    used, can_stream = users(trace), streamable(trace)
    stage_of = {block.id: n for n, block in enumerate(blocks)}
    plain, placed = lower(problem, with_traced(problem, [])), lower(problem, [Place.all(trace, update="host")])
    for n, unit in enumerate(units):
        weights = sum(placed.info(x).nbytes for x in unit.weights)
        grads, states = _nbytes(trace, unit.grads), _nbytes(trace, unit.states)
        homes = 0 if trace.about.precision is not None else weights
        handling = 3 * grads / hardware.bandwidth + 3 * hardware.overhead  # norms taken, gradients gathered
        yield ParameterChunk(
            weights=weights,
            padding=weights - sum(plain.info(x).nbytes for x in unit.weights),
            grads=grads,
            states=states,
            host=states + homes + (weights if grads else 0),
            workspace=unit.workspace,
            streams=unit.name in can_stream,
            forward=forward[n],
            backward=backward[n],
            up=_ticks(copy_seconds(weights, hardware, far.name, problem.home)),
            down=_ticks(copy_seconds(grads, hardware, problem.home, far.name) + handling) if grads else 0,
            on_device=_ticks(unit.moved / hardware.bandwidth + 8 * hardware.overhead) if unit.numel else 0,
            on_host=_ticks(host_seconds(unit, trace, hardware)),
            stage=next((stage_of[b.id] for b in used[unit.name] if b.id in stage_of), -1),
        )


def _stages(
    problem: Problem, units: Sequence[Unit], blocks: Sequence[Block], curve: MemoryCurve, end: int
) -> Iterator[BlockStage]:
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
        yield BlockStage(
            forward=_between(trace, block.first, block.last + 1),
            backward=_between(trace, block.backward + 1, until),
            again=_between(trace, block.first, min(again, block.last) + 1),
            out=_ticks(copy_seconds(moved, hardware, problem.home, far.name)) if far is not None else 0,
            back=_ticks(copy_seconds(moved, hardware, far.name, problem.home)) if far is not None else 0,
            dropped=_dropped(problem, block),
            moved=moved,
            rise=max(curve.high[k] for k in inside) - curve.before[block.first],
            chunk=chunk_of.get(block.id, -1),
        )


def _spans(curve: MemoryCurve, blocks: Sequence[Block], ready: Sequence[int], end: int) -> Iterator[BlockSpan]:
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
                yield BlockSpan(high=high, before=curve.before[start], inside=inside, done=done, replays=replays)
            inside, done, start, replays = now, finished, k, k in replays_from


def _dropped(problem: Problem, block: Block) -> int:
    """Bytes that the block makes and only its saves hold, less inputs that are held for it; 0: it cannot be run again."""
    trace = problem.trace
    if not problem.permits(Recompute) or obstacle(trace, [block]):
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
    if not problem.permits(Offload) or problem.hardware.far is None:
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
    count, is_narrow = len(profile.chunks), trace.about.precision is not None
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
    return outcome_or_never(problem, actions_of(problem, profile, setting))


def _smallest(problem: Problem, profile: Profile, mapped: Sequence[Mapped]) -> Found:
    """Of the few that the model finds smallest, with all units on the host and with none, the one that misses least."""
    found = []
    for n_persist in dict.fromkeys((0, len(profile.chunks))):
        found += nsmallest(3, (m.found(n_persist, 0) for m in mapped), key=lambda f: (f.peak, f.order))
    every = (m.found(len(profile.chunks), 0) for m in mapped)
    found += [f for f in every if not f.setting.n_swap and not f.setting.n_ckpt]  # plain training can always be carried out

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
    how = f"when: {profile.when}"
    if profile.size:
        how += f"; {len(profile.bounds) - 1} groups by chunks of {format_bytes(profile.size)}"
    return [
        f"{n_persist} of {units} units persist; of the others {n_buffer} keep their weights here ({how})",
        f"of {blocks} blocks the first {n_swap} are swapped and {n_ckpt} run again",
        f"the paper's model {expected} of {format_bytes(problem.limit(problem.home))}",
    ]


def _ticks(seconds: float) -> Ticks:
    return round(seconds * _TICKS)


def _between(trace: Trace, start: int, end: int) -> Ticks:
    return sum(_ticks(op.seconds) for op in trace.ops[start:end])


def _nbytes(trace: Trace, tensors: Iterable[int]) -> int:
    return sum(trace.tensors[x].nbytes for x in tensors)
