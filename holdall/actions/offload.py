"""Offload: copy a block's saved tensors to another tier after its forward, and prefetch them for its backward.

The idea of vDNN (arXiv 1602.08124), at the granularity of a block. On a recomputed block it moves the inputs that the block
keeps for its replay, which are then its only saved tensors; on a block that runs by a program, the tensors the program keeps.

With `saves` it moves single tensors, as Capuchin (ASPLOS 2020) does. A block may then have several such actions, each with
tensors and moments of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.recompute import Recompute, obstacle
from holdall.errors import InvalidInput
from holdall.types import Action, Block, Choice, Copy, Facts, Problem, Schedule, Trace, Wait

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class Offload(Facts):
    block: str
    inputs: tuple[int, ...] = ()  # positions of inputs that no other block needs
    lag: bool = False  # free the device's copy when the next block's forward is over, so that the copy overlaps it
    until: str = ""  # free it when the forward of this block is over instead: for copies that take longer than one block
    fetch: str = ""  # start the fetch when the backward of this block begins; empty: when the tensors are needed
    tier: str = ""  # destination of the tensors; empty: the nearest tier
    saves: tuple[int, ...] | None = None  # tensors that the block makes, by number (see `numbered`); None: all that it holds
    least: int = 0  # elements; smaller tensors stay on the device

    name: ClassVar[str] = "offload"
    exact: ClassVar[bool] = True
    on_shards: ClassVar[bool] = True
    rank: ClassVar[int] = 20
    by_default: ClassVar[bool] = True
    spares_activations: ClassVar[bool] = True
    what: ClassVar[str] = "saved tensors are copied to the next tier"

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({self.tier})

    def shares(self, other: Offload) -> bool:
        """Do both name tensors, and none that the other names?"""
        if self.saves is None or other.saves is None:
            return False
        return not set(self.saves) & set(other.saves) and not set(self.inputs) & set(other.inputs)

    @staticmethod
    def of(trace: Trace, block: Block, *, overlap: bool, tier: str = "") -> Offload:
        """The action for a block of a trace; `overlap`: copies overlap computation."""
        after = trace.blocks[block.id + 1] if block.id + 1 < len(trace.blocks) else None
        ahead = after is not None and after.backward is not None
        return Offload(
            block=block.name,
            inputs=own_inputs(trace, block),
            lag=overlap and after is not None,
            fetch=after.name if overlap and ahead and after is not None else "",
            tier=tier,
        )

    @staticmethod
    def samples(trace: Trace) -> list[Offload]:
        """A block without overlap (a CPU), with overlap, with copies that take the whole pass, and with a single tensor."""
        saving = [b for b in trace.blocks if b.saves and b.backward is not None]
        slow = Offload.of(trace, saving[0], overlap=True)
        slow = replace(slow, until=saving[-1].name, fetch=saving[-1].name) if len(saving) > 1 else slow
        single = replace(Offload.of(trace, saving[0], overlap=True), inputs=(), saves=(len(saving[0].saves) // 2,))
        return [
            Offload.of(trace, saving[0], overlap=False),
            Offload.of(trace, saving[min(1, len(saving) - 1)], overlap=True),
            slow,
            single,
        ]

    @classmethod
    def choices(cls, problem: Problem, block: Block) -> Iterable[Choice]:
        """Offload the block, or the inputs of a block that is recomputed, to each tier. Where copies overlap computation, each
        comes in two forms: hidden by the next block, which needs memory for both, and waited for at once ("now")."""
        for n, tier in enumerate(problem.hardware.others):
            yield from _to(problem, block, tier.name if n else "")

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace = problem.trace
        block = trace.block(self.block)
        tier = problem.other(self.tier)
        moved = self._moved(schedule, trace, block)
        needed = self._needed(schedule, trace, block, moved)
        if not moved or needed is None:
            return schedule
        if _leaving(schedule, block) & set(moved):
            raise InvalidInput(
                f"two offloads of `{self.block}` name saves of one tensor", hint="name all saves of a tensor in one of them"
            )
        schedule = schedule.copy()
        out = Copy(tensors=moved, src=schedule.home, dst=tier, name=self.block)
        back = Copy(tensors=moved, src=tier, dst=schedule.home, name=self.block)
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
        numbers = numbered(schedule, block)
        chosen = [x for n, x in numbers.items() if self.saves is None or n in self.saves]
        inside = [x for x in chosen if block.first <= trace.tensors[x].born <= block.last and x not in block.outputs]
        inputs = [block.inputs[i] for i in self.inputs if i < len(block.inputs)]
        if block.id not in schedule.replays:
            inputs = [x for x in inputs if x in _all_held(schedule, block)]
        moved = dict.fromkeys([*inside, *inputs])
        return tuple(x for x in moved if prod(trace.tensors[x].shape) >= self.least)

    def _needed(self, schedule: Schedule, trace: Trace, block: Block, moved: Collection[int]) -> int | None:
        """The op after which backward first asks for a tensor that was moved; None: never."""
        again = schedule.replays.get(block.id)
        if again is None:
            program = schedule.programs.get(block.id)
            return program.until if program else first_needed(trace, block, moved)
        retained = [trace.saves[block.saves[n]] for n, x in numbered(schedule, block).items() if x in moved]
        asked = [save.unpacked for save in retained if save.unpacked is not None]
        return min([again, *asked] if any(x in block.inputs for x in moved) else asked, default=None)

    def install(self, harness: Harness) -> None:
        from holdall.runtime.activations.offload import OffloadedPart

        part = OffloadedPart(
            saves=None if self.saves is None else frozenset(self.saves),
            inputs=frozenset(self.inputs),
            lag=self.lag,
            until=self.until,
            fetch=self.fetch,
            tier=self.tier,
            least=self.least,
        )
        harness.policy(self.block).offloads.append(part)


def _to(problem: Problem, block: Block, tier: str) -> Iterable[Choice]:
    overlap = problem.hardware.overlap
    if problem.permits(Recompute) and not obstacle(problem.trace, [block]):
        yield (by_replay := replayed(late=overlap, tier=tier))
        if overlap:
            at_once = replayed(late=False, tier=tier)
            yield replace(at_once, label=f"{by_replay.label} now", for_all=False, lean=False)
    if not overlap:
        yield held(late=False, tier=tier)
    elif not _is_last(problem.trace, block):  # no next block can hide the copy, and the fetch would follow at once
        yield (hidden := held(late=True, tier=tier))
        yield replace(held(late=False, tier=tier), label=f"{hidden.label} now", for_all=False)


def held(*, late: bool, tier: str = "") -> Choice:
    """The choice to offload a block's saved tensors."""
    label = f"{Offload.name} to {tier}" if tier else Offload.name
    return Choice(label=label, make=_held, given=(late, tier), moves=True, tier=tier, late=late, for_all=True)


def _held(trace: Trace, block: Block, late: bool, tier: str) -> tuple[Action, ...]:
    return (Offload.of(trace, block, overlap=late, tier=tier),)


def replayed(*, late: bool, tier: str = "") -> Choice:
    """The choice to recompute a block and to offload the inputs that its replay needs."""
    moved = held(late=late, tier=tier)
    return replace(moved, label=f"{Recompute.name} + {moved.label}", make=_replayed, recomputes=True, lean=True)


def _replayed(trace: Trace, block: Block, late: bool, tier: str) -> tuple[Action, ...]:
    return Recompute.of(trace, [block]), Offload.of(trace, block, overlap=late, tier=tier)


def _is_last(trace: Trace, block: Block) -> bool:
    """Does no later block save tensors for backward?"""
    return not any(b.saves and b.backward is not None for b in trace.blocks[block.id + 1 :])


def numbered(schedule: Schedule, block: Block) -> dict[int, int]:
    """Number -> tensor, of what the block holds for its backward: saved tensors by their order in autograd, or, where it runs
    by a program, tensors that its forward makes, by their order among all of these."""
    trace = schedule.trace
    if block.id in schedule.replays:
        return {n: trace.saves[block.saves[n]].tensor for n in sorted(schedule.retained.get(block.id, ()))}
    if block.id in schedule.programs:
        made = (x for op in trace.ops[block.first : block.last + 1] for x in op.writes)
        return {n: x for n, x in enumerate(made) if x in schedule.programs[block.id].tensors}
    return {n: trace.saves[i].tensor for n, i in enumerate(block.saves)}


def _leaving(schedule: Schedule, block: Block) -> set[int]:
    """Tensors that leave the device after the block's forward."""
    steps = schedule.after.get(block.last, ())
    return {x for step in steps if isinstance(step, Copy) and step.src == schedule.home for x in step.tensors}


def _all_held(schedule: Schedule, block: Block) -> Collection[int]:
    program = schedule.programs.get(block.id)
    return program.tensors if program else {schedule.trace.saves[i].tensor for i in block.saves}


def first_needed(trace: Trace, block: Block, tensors: Collection[int] | None = None) -> int | None:
    """The op after which backward first reads a tensor (or one of `tensors`) that this block saved; None: never."""
    saves = [trace.saves[i] for i in block.saves]
    asked = [s.unpacked for s in saves if tensors is None or s.tensor in tensors]
    return min((k for k in asked if k is not None), default=None)


def own_inputs(trace: Trace, block: Block) -> tuple[int, ...]:
    """Positions of the inputs that no other block needs in backward; blocks without a backward need nothing there."""
    needed = first_needed(trace, block)
    if needed is None:
        return ()
    numbers = set(block.saves)
    saved_by: dict[int, set[int]] = {x: set() for x in block.inputs}
    for i, save in enumerate(trace.saves):
        if save.tensor in saved_by:
            saved_by[save.tensor].add(i)
    elsewhere = {x for other in trace.blocks if other.id != block.id and other.backward is not None for x in other.inputs}
    return tuple(
        position
        for position, x in enumerate(block.inputs)
        if trace.tensors[x].born >= 0
        and x not in elsewhere
        and trace.tensors[x].freed is not None
        and (trace.tensors[x].freed or 0) < needed
        and saved_by[x] <= numbers
    )
