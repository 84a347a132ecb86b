"""The greedy search of TSPLIT: at the op that needs most, the decision that saves most bytes per second, again and again.

Decisions are about tensors that wait for their backward (swap them, or compute them again), about blocks that cannot run op by
op (run them again), and about modules (run them in so many pieces, which keep nothing and are computed again one by one). They
do not depend on a budget: that says how many of them are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from holdall.actions.layer_swap import LayerSwap, input_holders
from holdall.actions.offload import Offload
from holdall.actions.pieces import Pieces
from holdall.actions.pieces.regions import POSITIONS, SAMPLES, Region, regions
from holdall.actions.recompute import Recompute
from holdall.actions.recompute import obstacle as not_again
from holdall.actions.reschedule import obstacle
from holdall.cost.link import copy_seconds
from holdall.planners.capuchin.accesses import HeldTensor, Swap, candidates, ends_of_ops, holding
from holdall.planners.capuchin.recomputation import Recomputation, recomputation
from holdall.planners.tsplit.model import WAITED, StepModel
from holdall.types import Block, Problem, Trace

_KEPT = 32  # traces with modules in pieces


class Split(NamedTuple):
    """A module in so many pieces."""

    module: str
    by: str
    pieces: int


@dataclass(frozen=True)
class State:
    """Some decisions."""

    splits: tuple[Split, ...] = ()
    swapped: tuple[tuple[int, int], ...] = ()  # tensors, with the op at which each has to be away; WAITED: all the time
    again: tuple[int, ...] = ()  # tensors that are computed again
    rerun: tuple[str, ...] = ()  # blocks that run again as a whole

    def waited(self) -> State:
        """The same, and all copies are waited for."""
        return replace(self, swapped=tuple((x, WAITED) for x, _ in self.swapped))

    def pieces(self, trace: Trace) -> list[Pieces]:
        """The actions for the splits: one for all modules with pieces of one size."""
        groups: dict[tuple[str, int], list[str]] = {}
        for split in sorted(self.splits):
            rows = -(-regions(trace, split.by)[split.module].tokens // split.pieces)
            groups.setdefault((split.by, rows), []).append(split.module)
        return [Pieces(modules=tuple(modules), rows=rows, by=by) for (by, rows), modules in groups.items()]


class Option(NamedTuple):
    """What could be decided next."""

    nbytes: int  # less at the op that needs most
    seconds: float  # that a step takes longer
    changes: Mapping[str, Any]  # of the state

    @property
    def rank(self) -> tuple[float, int]:
        return self.nbytes / self.seconds if self.seconds > 0 else math.inf, self.nbytes


@dataclass
class _Step:
    """The step with the modules of a state in pieces, and what can be decided about it."""

    problem: Problem
    model: StepModel
    held: dict[int, HeldTensor]
    blocks: dict[str, Block]
    pools: dict[int, Recomputation] = field(default_factory=dict)  # of blocks that can run op by op
    whole: set[int] = field(default_factory=set)  # blocks that can run again as a whole only
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)  # tensor -> the ops after which it may leave, and is needed


class SplitTraces:
    """Traces with modules in pieces, the latest ones kept."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[frozenset[Split], Trace] = {}

    def of(self, state: State) -> Trace:
        key = frozenset(state.splits)
        if key not in self._known:
            trace = self._trace
            for action in state.pieces(trace):
                trace = action.changed(trace)
            if len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = trace
        return self._known[key]


class SplitSearch:
    """The decisions for one problem. `most`: pieces of a module. `traces`: shared with other searches for the same trace."""

    def __init__(self, problem: Problem, most: int, traces: SplitTraces | None = None) -> None:
        self.problem = problem
        self.traces = traces or SplitTraces(problem.trace)
        self.can_swap = problem.hardware.far is not None and problem.permits(Offload)
        self.can_rerun = problem.permits(Recompute)
        self.counts = [1 << n for n in range(1, most.bit_length())] if problem.permits(Pieces) else []
        self.regions = splittable(problem.trace) if self.counts else {}
        self._gains: dict[tuple[object, ...], tuple[int, float]] = {}  # of splits, for equal blocks once

    def states(self) -> list[State]:
        """No decision, one, two, and so on, until nothing makes the largest op smaller."""
        state = State()
        step = self._step(state)
        found = [state]
        while True:
            option = max(self._options(state, step), key=lambda o: o.rank, default=None)
            if option is None:
                return found
            chosen = replace(state, **option.changes)
            if "splits" in option.changes:
                chosen = self._without(chosen, step)
            if chosen.splits != state.splits or chosen.rerun != state.rerun:
                step = self._step(chosen)
            else:
                self._tell(step, chosen, state)
            state = chosen
            found.append(state)

    def uniform(self) -> list[State]:
        """All modules in as many pieces, for every number of pieces."""
        return [
            State(splits=tuple(Split(r.module, by, min(count, r.tokens)) for r, by in self.regions.values() if r.tokens > 1))
            for count in self.counts
            if self.regions
        ]

    def _step(self, state: State) -> _Step:
        trace = self.traces.of(state)
        problem = self.problem if trace is self.problem.trace else replace(self.problem, trace=trace)
        blocks = {b.name: b for b in holding(trace)}
        held = waiting_tensors(problem, state.rerun)
        step = _Step(problem, StepModel(problem), held, blocks)
        step.spans = {x: (_last(trace, tensor), _asked(trace, x)) for x, tensor in held.items()}
        for block in blocks.values() if self.can_rerun else ():
            own = [c.tensor for c in held.values() if c.block == block.id and c.input is None]
            if not obstacle(trace, block):
                step.pools[block.id] = recomputation(trace, block, own)
            elif not not_again(trace, [block]):
                step.whole.add(block.id)
        self._tell(step, state, State(splits=state.splits))
        return step

    def _tell(self, step: _Step, state: State, known: State) -> None:
        """Tell the model of the decisions of a state that are not known yet."""
        trace = step.problem.trace
        for name in state.rerun:
            if name not in known.rerun:
                block = step.blocks[name]
                step.model.away(_inside(step, block), block.last + 1, _backward(trace, block))
        for x in state.again[len(known.again) :]:
            last, back = step.spans[x]
            step.model.away(step.held[x].nbytes, last + 1, back)
            step.pools[step.held[x].block].choose(x)
        told = dict(known.swapped)
        for x, at in state.swapped:
            if x in told and told[x] == at:
                continue
            if x in told:  # it was swapped beside other ops so far
                step.model.back(step.held[x])
            last, back = step.spans[x]
            step.model.swap(step.held[x], last, back, at if at == WAITED else min(max(at, last + 1), back))

    def _options(self, state: State, step: _Step) -> Iterator[Option]:
        at = step.model.peak
        yield from self._of_tensors(state, step, at)
        yield from self._of_blocks(state, step, at)
        if self.regions:
            yield from self._of_modules(state, step, at)

    def _of_tensors(self, state: State, step: _Step, at: int) -> Iterator[Option]:
        trace = step.problem.trace
        taken = {*state.again, *(x for x, _ in state.swapped)}
        for tensor in step.held.values():
            last, back = step.spans[tensor.tensor]
            if not last < at <= back:
                continue
            if tensor.tensor in step.model.windows and at not in step.model.windows[tensor.tensor]:
                late = tensor.swap.out if at < step.model.windows[tensor.tensor].start else tensor.swap.into
                now = tuple((x, WAITED if x == tensor.tensor else k) for x, k in state.swapped)
                yield Option(tensor.nbytes, late, {"swapped": now})
            if tensor.tensor in taken:
                continue
            block = trace.blocks[tensor.block]
            if self.can_swap and (block.name not in state.rerun or tensor.input is not None):
                seconds = step.model.waiting(tensor, last, back, at)
                yield Option(tensor.nbytes, seconds, {"swapped": (*state.swapped, (tensor.tensor, at))})
            pool = step.pools.get(tensor.block)
            if pool is not None and tensor.tensor in pool.nbytes:
                seconds = pool.cost(tensor.tensor)
                yield Option(tensor.nbytes, seconds, {"again": (*state.again, tensor.tensor)})

    def _of_blocks(self, state: State, step: _Step, at: int) -> Iterator[Option]:
        trace = step.problem.trace
        for block in step.blocks.values():
            if block.id not in step.whole or block.name in state.rerun or not block.last < at <= _backward(trace, block):
                continue
            inner = {x for x, t in step.held.items() if t.block == block.id and t.input is None}
            left = tuple((x, k) for x, k in state.swapped if x not in inner)
            nbytes = _inside(step, block) - sum(step.held[x].nbytes for x, _ in state.swapped if x in inner)
            seconds = sum(op.seconds for op in trace.ops[block.first : block.last + 1])
            if nbytes > 0:
                yield Option(nbytes, seconds, {"swapped": left, "rerun": (*state.rerun, block.name)})

    def _of_modules(self, state: State, step: _Step, at: int) -> Iterator[Option]:
        """The module that the op at hand belongs to, in more pieces."""
        found = next((m for m in self.regions if _is_in(step.problem.trace.ops[at].site.module, m)), None)
        if found is None:
            return
        region, by = self.regions[found]
        now = next((s.pieces for s in state.splits if s.module == found), 1)
        for count in self.counts:
            if not now < count <= region.tokens:
                continue
            splits = (*(s for s in state.splits if s.module != found), Split(found, by, count))
            key = self._alike(found), step.problem.trace.ops[at].site.phase.name, now, count
            if key not in self._gains:
                self._gains[key] = self._gain(replace(state, splits=splits), step, found, at)
            nbytes, seconds = self._gains[key]
            if nbytes > 0:
                yield Option(nbytes, seconds, {"splits": splits})

    def _gain(self, state: State, step: _Step, module: str, at: int) -> tuple[int, float]:
        """Bytes that the largest op of a module then needs less than the op at hand, and seconds that the step takes longer."""
        made = self._step(self._without(state, step))
        ops = made.problem.trace.ops
        largest = max(made.model.needed[op.id] for op in ops if _is_in(op.site.module, module))
        before = sum(op.seconds for op in step.problem.trace.ops)
        return step.model.needed[at] - largest, sum(op.seconds for op in ops) - before

    def _alike(self, module: str) -> tuple[object, ...]:
        """The same for modules in the same place of equal blocks."""
        trace = self.problem.trace
        block = next(b for b in trace.blocks if _is_in(module, b.module))
        sizes = tuple(trace.tensors[trace.saves[n].tensor].nbytes for n in block.saves)
        return block.kind, module.removeprefix(block.module), sizes

    def _without(self, state: State, step: _Step) -> State:
        """The state less decisions about tensors that splits do away with, and about ops of their blocks, which then run as a
        whole."""
        trace = self.traces.of(state)
        blocks = moved_whole(trace, ())
        left = waiting_tensors(replace(self.problem, trace=trace), state.rerun)
        inner = {c.tensor for c in step.held.values() if c.block in blocks}
        return replace(
            state,
            swapped=tuple((x, at) for x, at in state.swapped if x in left),
            again=tuple(x for x in state.again if x in left and x not in inner),
        )


def splittable(trace: Trace) -> Mapping[str, tuple[Region, str]]:
    """The modules that can run in pieces, with what rows are."""
    by_positions = {m: (r, POSITIONS) for m, r in regions(trace, POSITIONS).items()}
    by_samples = {m: (r, SAMPLES) for m, r in regions(trace, SAMPLES).items()}
    apart = {m: found for m, found in by_samples.items() if not any(_is_in(m, o) or _is_in(o, m) for o in by_positions)}
    return {m: found for m, found in {**by_positions, **apart}.items() if found[0].tokens > 1}


def chosen_prefixes(states: Sequence[State], most: int) -> list[State]:
    """All of the states, or so many of them, evenly."""
    if len(states) <= most:
        return list(states)
    return [states[round(n * (len(states) - 1) / (most - 1))] for n in range(most)]


def moved_whole(trace: Trace, rerun: Iterable[str]) -> set[int]:
    """Blocks that a part of runs in pieces, or that run again: what they hold leaves by `offload`, not by `layer_swap`."""
    split = [module for pieces in trace.about.pieces for module in pieces.modules]
    return {b.id for b in trace.blocks if b.name in rerun or any(_is_in(module, b.module) for module in split)}


def waiting_tensors(problem: Problem, rerun: Iterable[str]) -> dict[int, HeldTensor]:
    """Tensors that wait for backward and can leave, each with the block whose forward uses it last."""
    trace, ends = problem.trace, ends_of_ops(problem.trace)
    apart = moved_whole(trace, rerun)
    found = {c.tensor: c for c in candidates(problem) if c.block in apart}
    far = problem.hardware.far.name if problem.hardware.far is not None else problem.home
    for block in holding(trace):
        if block.id in apart:
            continue
        position = {x: n for n, x in enumerate(block.inputs)}
        for x in LayerSwap.of(trace, block).tensors(trace):
            if x in found or (x in position and apart & (input_holders(trace, block, x) or set())):
                continue
            size = trace.tensors[x].nbytes
            swap = Swap(
                evict=ends[block.last],
                back=ends[_asked(trace, x)],
                out=copy_seconds(size, problem.hardware, problem.home, far),
                into=copy_seconds(size, problem.hardware, far, problem.home),
            )
            found[x] = HeldTensor(tensor=x, block=block.id, nbytes=size, swap=swap, input=position.get(x))
    return found


def _is_in(module: str, other: str) -> bool:
    return f"{module}.".startswith(f"{other}.") if other else True


def _last(trace: Trace, tensor: HeldTensor) -> int:
    return trace.blocks[tensor.block].last


def _asked(trace: Trace, x: int) -> int:
    """The op after which backward first asks for a tensor."""
    return min(save.unpacked for save in trace.saves_of(x) if save.unpacked is not None)


def _backward(trace: Trace, block: Block) -> int:
    assert block.backward is not None
    return min(block.backward, len(trace.ops) - 1)


def _inside(step: _Step, block: Block) -> int:
    """Bytes that a block makes and holds for its backward."""
    return sum(t.nbytes for t in step.held.values() if t.block == block.id and t.input is None)
