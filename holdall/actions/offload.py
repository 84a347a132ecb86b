"""Offload: what a block holds for backward waits in the next tier, and is fetched ahead of need.

The idea of vDNN (arXiv 1602.08124), at the granularity of a block. On a recomputed block it moves the inputs that the block
keeps for its replay, since those are then all it holds; on one that runs by a program, what the program keeps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from holdall.errors import Unsupported
from holdall.types import Block, Copy, Facts, Problem, Schedule, Trace, Wait


@dataclass(frozen=True, kw_only=True)
class Offload(Facts):
    block: str
    inputs: tuple[int, ...] = ()  # positions of inputs that nobody else needs
    lag: bool = False  # free the device's copy when the next block's forward is over, so that copying overlaps
    until: str = ""  # free it when the forward of this block is over instead: where a copy takes longer than one block
    fetch: str = ""  # start fetching when the backward of this block begins; empty: when the tensors are needed

    name: ClassVar[str] = "offload"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 20
    by_default: ClassVar[bool] = True

    @property
    def uses_store(self) -> bool:
        return True

    @staticmethod
    def of(trace: Trace, block: Block, *, overlap: bool) -> Offload:
        """The action for a block of a trace; `overlap`: copies run beside computation."""
        after = trace.blocks[block.id + 1] if block.id + 1 < len(trace.blocks) else None
        ahead = after is not None and after.backward is not None
        return Offload(
            block=block.name,
            inputs=own_inputs(trace, block),
            lag=overlap and after is not None,
            fetch=after.name if overlap and ahead and after is not None else "",
        )

    @staticmethod
    def samples(trace: Trace) -> list[Offload]:
        """A block as on a CPU, as where copies overlap, and as where they take the whole pass."""
        saving = [b for b in trace.blocks if b.saves and b.backward is not None]
        slow = Offload.of(trace, saving[0], overlap=True)
        slow = replace(slow, until=saving[-1].name, fetch=saving[-1].name) if len(saving) > 1 else slow
        return [
            Offload.of(trace, saving[0], overlap=False),
            Offload.of(trace, saving[min(1, len(saving) - 1)], overlap=True),
            slow,
        ]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace = problem.trace
        block = trace.block(self.block)
        far = problem.hardware.far
        if far is None:
            raise Unsupported("there is no tier to offload to", hint="plan for hardware with a second tier")
        moved = self._moved(schedule, trace, block)
        program = schedule.programs.get(block.id)
        begins = program.until if program else first_needed(trace, block, moved)
        needed = schedule.replays.get(block.id, begins)
        if not moved or needed is None:
            return schedule
        schedule = schedule.copy()
        out = Copy(tensors=moved, src=schedule.home, dst=far.name, name=self.block)
        back = Copy(tensors=moved, src=far.name, dst=schedule.home, name=self.block)
        wait = Wait(tensors=moved)
        schedule.insert(block.last, [out])
        after = trace.blocks[block.id + 1].last if self.lag and block.id + 1 < len(trace.blocks) else block.last
        after = trace.block(self.until).last if self.lag and self.until else after
        schedule.insert(after, [wait])
        fetched = trace.block(self.fetch).backward if self.fetch else None
        if fetched is not None and fetched < needed:
            schedule.insert(needed, [wait], first=True)
            schedule.insert(fetched, [back], first=True)
        else:
            schedule.insert(needed, [back, wait], first=True)
        return schedule

    def _moved(self, schedule: Schedule, trace: Trace, block: Block) -> tuple[int, ...]:
        inputs = [block.inputs[i] for i in self.inputs if i < len(block.inputs)]
        if block.id in schedule.replays:
            return tuple(inputs)
        program = schedule.programs.get(block.id)
        saved = dict.fromkeys(sorted(program.tensors) if program else (trace.saves[i].tensor for i in block.saves))
        inside = [x for x in saved if block.first <= trace.tensors[x].born <= block.last and x not in block.outputs]
        return tuple(dict.fromkeys([*inside, *(x for x in inputs if x in saved)]))

    def install(self, harness: Any) -> None:
        policy = harness.policy(self.block)
        policy.park = True
        policy.inputs = frozenset(self.inputs)
        policy.lag = self.lag
        policy.until = self.until
        policy.fetch = self.fetch


def first_needed(trace: Trace, block: Block, tensors: Collection[int] | None = None) -> int | None:
    """The op after which backward first asks for something (or one of `tensors`) this block saved; None: never."""
    saves = [trace.saves[i] for i in block.saves]
    asked = [s.unpacked for s in saves if tensors is None or s.tensor in tensors]
    return min((k for k in asked if k is not None), default=None)


def own_inputs(trace: Trace, block: Block) -> tuple[int, ...]:
    """Positions of the inputs that only this block holds for backward."""
    needed = first_needed(trace, block)
    if needed is None:
        return ()
    numbers = set(block.saves)
    saved_by: dict[int, set[int]] = {x: set() for x in block.inputs}
    for i, save in enumerate(trace.saves):
        if save.tensor in saved_by:
            saved_by[save.tensor].add(i)
    elsewhere = {x for other in trace.blocks if other.id != block.id for x in other.inputs}
    return tuple(
        position
        for position, x in enumerate(block.inputs)
        if trace.tensors[x].born >= 0
        and x not in elsewhere
        and trace.tensors[x].freed is not None
        and (trace.tensors[x].freed or 0) < needed
        and saved_by[x] <= numbers
    )
