"""Rotor: the fastest way to run a chain of unequal blocks in a given memory, by recomputation alone.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (arXiv 1911.13214). A block
keeps everything, or a stretch of blocks keeps the input of its first; what was dropped is run again when backward comes to
it, and may be dropped again in parts. An exact search over all such schedules (`table.py`), in slots of memory.

The search knows a chain of sizes: what lies beside the blocks (weights, gradients, the head) it does not see. So one table
answers for every memory, each answer is simulated whole, and the fastest that fits is taken.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.recompute import Inner, Recompute
from holdall.errors import InvalidInput
from holdall.planners.rotor.table import Dropped, Item, Stage, Table, Taken
from holdall.planning.finish import finish, outcome_or_never, over_budget, with_traced
from holdall.planning.segments import runs
from holdall.simulator.curve import memory_curve
from holdall.types import Action, Block, Kind, Outcome, Plan, Problem, Trace
from holdall.units import format_bytes, format_seconds

_ALL = 24  # answers that are all simulated; of more, those around the budget
_NEAR = 3  # answers beyond the largest that seems to fit: the search's bytes are rounded up


@dataclass(frozen=True, kw_only=True)
class Rotor:
    slots: int = 500  # units of memory that the search counts in

    name: ClassVar[str] = "rotor"
    paper: ClassVar[str] = "Beaumont et al. 2019, arXiv 1911.13214"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.slots < 2:
            raise InvalidInput(f"`slots` is {self.slots}", hint="use at least 2; 500 is usual")
        rows = runs(problem.trace)
        blocks = [block for row in rows for block in row]
        if not blocks:
            return finish(self, problem, [], why=["no block can be recomputed"], began=began)
        chain = chain_of(problem, rows)
        unit = max(1, -(-enough(chain) // self.slots))
        table = Table(in_slots(chain, unit), self.slots + 1 + len(chain), rows=row_numbers(rows))
        answers = [table.items(0, len(blocks), m) for m, _ in table.stairs(0, len(blocks))]
        tried = Tried(problem, blocks, answers)
        best = tried.best()
        why = [f"{_described(answers[best], len(blocks))}; {len(answers)} schedules, {len(tried.outcomes)} simulated"]
        why.append(f"memory of the blocks counted in slots of {format_bytes(unit)}")
        again = tried.outcomes[best].recompute_seconds or 0.0
        why.append(f"{format_seconds(again)} of recomputation is the least that was found for this budget")
        return finish(self, problem, tried.actions(best), why=why, began=began)


class Tried:
    """Answers of the table, from the smallest memory to the largest, and what the simulator says of them."""

    def __init__(self, problem: Problem, blocks: Sequence[Block], answers: Sequence[tuple[Item, ...]]) -> None:
        self._problem = problem
        self._blocks = blocks
        self._answers = answers
        self.outcomes: dict[int, Outcome] = {}

    def actions(self, n: int) -> list[Action]:
        return with_traced(self._problem, actions_of(self._problem.trace, self._blocks, self._answers[n]))

    def best(self) -> int:
        """The fastest that fits; if none does, the smallest."""
        count = len(self._answers)
        always = [n for n in (*range(_NEAR), *(count >> k for k in range(1, count.bit_length()))) if n < count]
        for n in range(count) if count <= _ALL else always:
            self._simulate(n)
        low, high = 0, count  # the first that does not fit, if fits come first
        while count > _ALL and low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._fits(middle) else (low, middle)
        for n in range(low, min(low + _NEAR, count)):
            self._simulate(n)
        fitting = [n for n in self.outcomes if self._fits(n)]
        if fitting:
            return min(fitting, key=lambda n: (self.outcomes[n].seconds, self._needed(n)))
        return min(self.outcomes, key=self._needed)

    def _simulate(self, n: int) -> Outcome:
        if n not in self.outcomes:
            self.outcomes[n] = outcome_or_never(self._problem, self.actions(n))
            self._problem.progress("rotor: schedules", len(self.outcomes), min(len(self._answers), _ALL), "")
        return self.outcomes[n]

    def _fits(self, n: int) -> bool:
        return not over_budget(self._problem, self._simulate(n))

    def _needed(self, n: int) -> int:
        outcome = self.outcomes[n]
        return max(outcome.peak.get(self._problem.home, 0), outcome.reserved or 0)


def chain_of(problem: Problem, rows: Sequence[Sequence[Block]]) -> list[Stage]:
    """The blocks as stages of a chain, in bytes and seconds of the trace, and after them the loss."""
    trace = problem.trace
    curve = memory_curve(problem, [])
    blocks = [block for row in rows for block in row]
    owner: dict[int, int] = {}
    for block in trace.blocks:
        for x in block.inputs:
            owner[x] = -1 if x in owner else block.id  # what several blocks take stays whatever is done
    inputs = [sum(trace.tensors[x].nbytes for x in b.inputs if owner[x] == b.id and trace.tensors[x].born >= 0) for b in blocks]
    last = blocks[-1]
    inputs.append(sum(trace.tensors[x].nbytes for x in last.outputs))
    left = [t for t in trace.tensors.values() if t.kind is Kind.GRAD and t.born >= 0]
    stages = []
    for n, block in enumerate(blocks):
        a, out, begin = inputs[n], inputs[n + 1], block.backward
        assert begin is not None  # else it were in no row
        end = blocks[n - 1].backward if n else None
        ends = range(begin + 1, (end if end is not None and end > begin else _last_of(trace, block)) + 1)
        held = _held(trace, block)
        forward = max(curve.high[block.first : block.last + 1]) - curve.before[block.first]
        backward = max(curve.high[k] for k in ends) - curve.before[ends[0]]
        stages.append(
            Stage(
                uf=sum(op.seconds for op in trace.ops[block.first : block.last + 1]),
                ub=sum(trace.ops[k].seconds for k in ends),
                a=a,
                abar=a + held,
                of=max(0, forward - held - out),
                ob=backward + out - a,  # so that both gradients, and what comes and goes, add up
                stop=sum(op.seconds for op in trace.ops[_last_pack(trace, block) + 1 : block.last + 1]),
                g=sum(t.nbytes for t in left if t.born in ends),
            )
        )
    begin = last.backward
    assert begin is not None
    tail = range(last.last + 1, begin + 1)
    top = max((curve.high[k] for k in tail), default=0) - (curve.before[tail[0]] if tail else 0)
    return [*stages, Stage(uf=0.0, ub=0.0, a=inputs[-1], abar=inputs[-1], of=max(0, top))]


def in_slots(chain: Sequence[Stage], unit: int) -> list[Stage]:
    """The chain in units of memory, every size rounded up."""

    def slots(size: int) -> int:
        return -(-size // unit)

    after = [*(stage.a for stage in chain[1:]), 0]
    return [
        Stage(
            uf=stage.uf,
            ub=stage.ub,
            a=slots(stage.a),
            abar=slots(stage.abar - stage.a + out) + slots(stage.a) - slots(out),  # what it keeps, rounded up
            of=slots(stage.of),
            ob=slots(stage.ob),
            g=slots(stage.g),
            stop=stage.stop,
        )
        for stage, out in zip(chain, after, strict=True)
    ]


def actions_of(trace: Trace, blocks: Sequence[Block], items: Iterable[Item]) -> list[Recompute]:
    """One action for each stretch that the forward drops; what its replay drops again lies inside."""
    return [
        Recompute.of(trace, blocks[item.first : item.last + 1], inner=nested_segments(blocks, item.items))
        for item in items
        if isinstance(item, Dropped)
    ]


def nested_segments(blocks: Sequence[Block], items: Iterable[Item], whole: Collection[str] = ()) -> tuple[Inner, ...]:
    """The segments of a replay. `whole`: blocks whose line of a menu cannot be run op by op; they are a segment each."""
    found = []
    for item in items:
        if isinstance(item, Dropped):
            names = tuple(b.name for b in blocks[item.first : item.last + 1])
            found.append(Inner(blocks=names, inner=nested_segments(blocks, item.items, whole)))
        elif isinstance(item, Taken) and blocks[item.stage].name in whole:
            found.append(Inner(blocks=(blocks[item.stage].name,)))
    return tuple(found)


def forwards(items: Iterable[Item], count: int) -> list[int]:
    """How often each of the first `count` stages is run forward."""
    times = [1] * count
    waiting = [item for item in items if isinstance(item, Dropped)]
    while waiting:
        dropped = waiting.pop()
        for n in range(dropped.first, dropped.last + 1):
            times[n] += 1
        waiting += [item for item in dropped.items if isinstance(item, Dropped)]
    return times


def _described(items: tuple[Item, ...], count: int) -> str:
    times = forwards(items, count)
    kept = sum(t == 1 for t in times)
    if kept == count:
        return "everything is kept"
    often = f"{max(times)} times at most, {sum(times) / count:.2f} on average"
    return f"{kept} of {count} blocks are kept whole, the others run {often}"


def enough(chain: Sequence[Stage]) -> int:
    """Bytes in which every block can keep everything."""
    after = [*(stage.a for stage in chain[1:]), 0]
    kept = [stage.abar - stage.a + out for stage, out in zip(chain, after, strict=True)]
    return (
        sum(kept)
        + sum(stage.g for stage in chain)
        + max(stage.a + out + max(stage.of, stage.ob) for stage, out in zip(chain, after, strict=True))
    )


def _held(trace: Trace, block: Block) -> int:
    """What the block makes and autograd holds, but for what it returns."""
    saved = {trace.saves[i].tensor for i in block.saves} - set(block.outputs)
    return sum(trace.tensors[x].nbytes for x in saved if block.first <= trace.tensors[x].born <= block.last)


def _last_pack(trace: Trace, block: Block) -> int:
    """The last op that a replay of the block runs, if nobody needs its result."""
    return max(trace.saves[i].packed for i in block.saves)


def _last_of(trace: Trace, block: Block) -> int:
    """The op with which autograd lets go of the last that the block saved."""
    ends = [trace.saves[i].released for i in block.saves]
    return max((k for k in ends if k is not None), default=block.backward or 0)


def row_numbers(rows: Sequence[Sequence[Block]]) -> list[int]:
    return [*(n for n, row in enumerate(rows) for _ in row), len(rows)]
