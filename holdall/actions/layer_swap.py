"""Layer swap: feature maps of a layer leave while the layer itself computes, as in vDNN (arXiv 1602.08124).

A layer's inputs set out when its forward begins, and what it saves inside as soon as it is saved, or all of them later
(`begin`); the device's copies are freed when its forward is over (`until`: that of a later layer). An input may be held by the
layers before, too: the one that made it, if it saved its result, and others that read it. They share one copy, which comes
back for all of them.

A layer may run by a program (`reschedule`). Its inputs leave in the same way, and tensors that the program keeps (`made`, in
place of `inner`) when its forward is over; backward asks for all of them when the layer's backward begins.

A layer may have several such actions, each with tensors and moments of its own. With `packed`, the words that are not zero
leave, and a mask of where they are: lossless, and small for results of ReLU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.offload import Offload
from holdall.actions.reschedule import Reschedule
from holdall.errors import InvalidInput, Unsupported
from holdall.types import Block, Copy, Facts, Phase, Problem, Run, Schedule, Step, Trace, Wait
from holdall.types.layout import allocated_bytes
from holdall.types.trace import OpId, TensorId, once_per_trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_PASSES = 3  # over a tensor's bytes, to pack them or to put them back
_NONE: Mapping[int, Collection[TensorId]] = {}


@dataclass(frozen=True, kw_only=True)
class LayerSwap(Facts):
    block: str  # the last that reads the inputs in forward
    inputs: tuple[int, ...] = ()  # positions of the inputs that leave
    inner: tuple[int, ...] = ()  # saves of the block, counted from its first, whose tensors leave as soon as they are saved
    made: tuple[int, ...] = ()  # where it runs by a program: tensors that its forward makes and the program keeps, by number
    holders: tuple[str, ...] = ()  # earlier blocks that hold one of the inputs for backward
    begin: str = ""  # the copies begin when the forward of this block is over; empty: as soon as the tensors are there
    until: str = ""  # free the device's copies when the forward of this block is over; empty: the block's own
    fetch: str = ""  # start the fetch when the backward of this block begins; empty: when the tensors are needed
    arrive: str = ""  # the backward of this block waits for the fetch; empty: whoever needs the tensors
    tier: str = ""  # destination of the tensors; empty: the nearest tier
    packed: int = 0  # bytes of a word, where only words that are not zero leave (FlashNeuron, FAST 2021); 0: all bytes do
    density: float = 0.5  # share of values assumed not to be zero: the bytes of a run depend on its values

    name: ClassVar[str] = "layer_swap"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 21
    by_default: ClassVar[bool] = True
    alone: ClassVar[bool] = True
    beside: ClassVar[frozenset[str]] = frozenset({Reschedule.name})  # tensors that a program keeps may leave
    spares_activations: ClassVar[bool] = True
    permitted_by: ClassVar[frozenset[str]] = frozenset({Offload.name})
    what: ClassVar[str] = "a layer's feature maps are copied to the next tier while it computes"

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({self.tier})

    def shares(self, other: LayerSwap) -> bool:
        """Does the other name other tensors of the block?"""
        pairs = ((self.inputs, other.inputs), (self.inner, other.inner), (self.made, other.made))
        return not any(set(mine) & set(theirs) for mine, theirs in pairs)

    @staticmethod
    def of(
        trace: Trace,
        block: Block,
        *,
        only: Collection[TensorId] | None = None,
        kept: Mapping[int, Collection[TensorId]] = _NONE,
    ) -> LayerSwap:
        """The action for all feature maps of a block that can leave, or for those in `only`. `kept`: what the programs of
        blocks that run by one keep."""
        positions, holders = [], set[int]()
        for position, x in enumerate(block.inputs):
            held = input_holders(trace, block, x, kept)
            if held is not None and (only is None or x in only):
                positions.append(position)
                holders |= held
        inner, made = dict[TensorId, int](), dict[TensorId, int]()
        if block.id in kept:
            made = {x: n for n, x in enumerate(_made(trace, block)) if x in kept[block.id] and x not in block.outputs}
        else:
            for number, save in enumerate(block.saves):
                x = trace.saves[save].tensor
                if is_inner(trace, block, x):
                    inner.setdefault(x, number)
        return LayerSwap(
            block=block.name,
            inputs=tuple(positions),
            inner=tuple(n for x, n in inner.items() if only is None or x in only),
            made=tuple(n for x, n in made.items() if only is None or x in only),
            holders=tuple(trace.blocks[n].name for n in sorted(holders - {block.id})),
        )

    @staticmethod
    def samples(trace: Trace) -> list[LayerSwap]:
        """A block that is synchronised, one that is fetched a block ahead, and one whose copies take the whole pass."""
        saving = [b for b in trace.blocks if b.saves and b.backward is not None]
        first, second = (LayerSwap.of(trace, saving[min(n, len(saving) - 1)]) for n in (0, 1))
        ahead = saving[2 % len(saving)].name
        return [
            first,
            replace(second, fetch=ahead, arrive=ahead),
            replace(second, begin=second.block, until=saving[-1].name, fetch=saving[-1].name),
            replace(first, packed=4, density=1.0),
        ]

    def tensors(self, trace: Trace) -> tuple[TensorId, ...]:
        """The tensors that leave: inputs first."""
        block = trace.block(self.block)
        inputs = [block.inputs[n] for n in self.inputs if n < len(block.inputs)]
        inner = [trace.saves[block.saves[n]].tensor for n in self.inner if n < len(block.saves)]
        made = [x for n, x in enumerate(_made(trace, block)) if n in self.made] if self.made else []
        return tuple(dict.fromkeys([*inputs, *inner, *made]))

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace = problem.trace
        block = trace.block(self.block)
        is_program = block.id in schedule.programs
        if is_program != bool(self.made) and (self.made or self.inner):  # saves have other numbers than a program's tensors
            return replace(self, inner=(), made=()).rewrite(schedule, problem)
        moved = self.tensors(trace)
        self._refuse(schedule, trace)
        asked = [asked_for(schedule, x) for x in moved]
        needed = min((op for op in asked if op is not None), default=None)
        if needed is None:
            return schedule
        if None in asked:
            raise Unsupported(
                f"`{self.block}` swaps a tensor that no backward reads", hint="plan again: holdall.plan(trace, ...)"
            )
        schedule = schedule.copy()
        if self.packed:
            self._pack(schedule, problem, moved, needed)
            return schedule
        self._send(schedule, trace, block, problem.other(self.tier))
        schedule.insert(trace.block(self.until).last if self.until else block.last, [Wait(tensors=moved)])
        back = Copy(tensors=moved, src=problem.other(self.tier), dst=schedule.home, name=self.block)
        fetched = trace.block(self.fetch).backward if self.fetch else None
        arrived = trace.block(self.arrive).backward if self.arrive else None
        if fetched is not None and fetched < needed:
            schedule.insert(needed, [Wait(tensors=moved)], first=True)
            if arrived is not None and fetched < arrived < needed:
                schedule.insert(arrived, [Wait(tensors=moved)], first=True)
            _insert_after_waits(schedule, fetched, back)
        else:
            schedule.insert(needed, [back, Wait(tensors=moved)], first=True)
        return schedule

    def _pack(self, schedule: Schedule, problem: Problem, moved: tuple[TensorId, ...], needed: OpId) -> None:
        """The codes of the tensors leave and come back in their place."""
        trace, tier = problem.trace, problem.other(self.tier)
        block = trace.block(self.block)
        codes = {x: self._codes(schedule, problem, x) for x in moved}
        inputs = {block.inputs[n] for n in self.inputs if n < len(block.inputs)}
        for x, code in codes.items():
            at = block.first - 1 if x in inputs else max(trace.saves[saved_as(trace)[x][0]].packed, trace.tensors[x].born)
            out = Copy(tensors=(code,), src=schedule.home, dst=tier, name=self.block)
            schedule.insert(
                trace.block(self.begin).last if self.begin else at,
                [_coding(problem, "encode", x, code, trace.tensors[x].nbytes), out],
            )
        all_codes = tuple(codes.values())
        leaves = Wait(tensors=(*moved, *all_codes))
        schedule.insert(trace.block(self.until).last if self.until else block.last, [leaves])
        back = Copy(tensors=all_codes, src=tier, dst=schedule.home, name=self.block)
        whole: list[Step] = [
            Wait(tensors=all_codes),
            *(_coding(problem, "decode", code, x, trace.tensors[x].nbytes) for x, code in codes.items()),
        ]
        fetched = trace.block(self.fetch).backward if self.fetch else None
        if fetched is not None and fetched < needed:
            schedule.insert(needed, whole, first=True)
            _insert_after_waits(schedule, fetched, back)
        else:
            schedule.insert(needed, [back, *whole], first=True)

    def _codes(self, schedule: Schedule, problem: Problem, x: TensorId) -> TensorId:
        from holdall.codecs.csr import csr_bytes  # planning needs no torch before this

        info = schedule.info(x)
        words = info.nbytes // self.packed
        size = allocated_bytes(csr_bytes(words, round(self.density * words), self.packed), problem.hardware.device)
        return schedule.add(info, name=f"{info.name} packed", dtype="uint8", nbytes=size, freed=info.born)

    def _send(self, schedule: Schedule, trace: Trace, block: Block, tier: str) -> None:
        """The copies out: of the inputs when the block begins, of the others when they are saved; or of all when they may."""
        if self.begin:
            out = Copy(tensors=self.tensors(trace), src=schedule.home, dst=tier, name=self.block)
            schedule.insert(trace.block(self.begin).last, [out])
            return
        inputs = tuple(block.inputs[n] for n in self.inputs if n < len(block.inputs))
        if inputs:
            schedule.insert(block.first - 1, [Copy(tensors=inputs, src=schedule.home, dst=tier, name=self.block)])
        for number in self.inner:
            if number < len(block.saves):
                save = trace.saves[block.saves[number]]
                out = Copy(tensors=(save.tensor,), src=schedule.home, dst=tier, name=self.block)
                schedule.insert(max(save.packed, trace.tensors[save.tensor].born), [out])
        made = tuple(x for n, x in enumerate(_made(trace, block)) if n in self.made)
        if made:
            schedule.insert(block.last, [Copy(tensors=made, src=schedule.home, dst=tier, name=self.block)])

    def _refuse(self, schedule: Schedule, trace: Trace) -> None:
        moved = set(self.tensors(trace))
        split = [module for pieces in trace.about.pieces for module in pieces.modules]
        for name in (self.block, *self.holders):
            if any(f"{module}.".startswith(f"{trace.block(name).module}.") for module in split):
                raise Unsupported(
                    f"`{self.block}` cannot be swapped: `{name}` runs in pieces", hint=f"keep or offload `{self.block}`"
                )
        for name in self.holders:
            holder = trace.block(name)
            if holder.id in schedule.replays and moved & set(holder.inputs):
                raise Unsupported(
                    f"an input of `{self.block}` cannot be swapped: `{name}` holds it for a replay",
                    hint=f"keep `{name}`, or do not swap `{self.block}`",
                )
        block = trace.block(self.block)
        steps = (step for op in range(block.first - 1, block.last + 1) for step in schedule.after.get(op, ()))
        if any(isinstance(step, Copy) and step.src == schedule.home and moved & set(step.tensors) for step in steps):
            raise InvalidInput(
                f"two swaps of `{self.block}` name saves of one tensor", hint="name all saves of a tensor in one of them"
            )
        for number, program in schedule.programs.items():
            name = trace.blocks[number].name
            if moved & program.tensors and name not in (self.block, *self.holders):
                raise Unsupported(
                    f"an input of `{self.block}` cannot be swapped: the program of `{name}` keeps it",
                    hint="plan again: holdall.plan(trace, ...)",
                )

    def install(self, harness: Harness) -> None:
        from holdall.runtime.activations.layer_swap import SwapPolicy  # planning needs no torch

        for name in self.holders:
            holder = harness.policy(name)
            if holder.offloads:
                raise Unsupported(f"`{name}` is offloaded and holds an input of `{self.block}`", hint=f"swap `{name}`, too")
            holder.lends = self.tier
        policy = SwapPolicy(
            inputs=frozenset(self.inputs),
            early=frozenset(self.inner),
            made=frozenset(self.made),
            begin=self.begin,
            until=self.until or self.block,
            fetch=self.fetch,
            arrive=self.arrive,
            tier=self.tier,
            width=self.packed,
        )
        harness.policy(self.block).swaps.append(policy)


def input_holders(trace: Trace, block: Block, x: TensorId, kept: Mapping[int, Collection[TensorId]] = _NONE) -> set[int] | None:
    """The blocks that hold an input for backward, if this block may swap it: it reads it last, and only blocks hold it. `kept`:
    what programs keep."""
    info = trace.tensors[x]
    by_program = {n for n, tensors in kept.items() if x in tensors}
    asked = [s.unpacked for s in trace.saves_of(x) if s.unpacked is not None]
    if info.born < 0 or info.freed is None or not asked or info.freed >= min(asked):
        return None  # the user's, or somebody holds it until backward
    if last_reader(trace).get(x) != block.id or x in block.outputs or last_change(trace).get(x, -1) >= block.first:
        return None
    held = holding_blocks(trace)
    savers = [held.get(n) for n in saved_as(trace)[x]]
    if any(b is None or b > block.id for b in savers) or max(by_program, default=0) > block.id:
        return None
    return by_program | {b for b in savers if b is not None and b not in kept}


def asked_for(schedule: Schedule, x: TensorId) -> OpId | None:
    """The op after which backward first asks for a tensor: autograd, or the program of a block; None: never."""
    trace, programs = schedule.trace, schedule.programs
    holders = holding_blocks(trace)
    saves = [trace.saves[n].unpacked for n in saved_as(trace).get(x, ()) if holders.get(n) not in programs]
    return min([op for op in saves if op is not None] + [p.until for p in programs.values() if x in p.tensors], default=None)


def _made(trace: Trace, block: Block) -> list[TensorId]:
    """What a block's forward makes, in order: programs name tensors by it."""
    return [x for op in trace.ops[block.first : block.last + 1] for x in op.writes]


def is_inner(trace: Trace, block: Block, x: TensorId) -> bool:
    """Whether a tensor is made inside the block, held by it alone, and never changed after it was first saved."""
    numbers = saved_as(trace)[x]
    inside = block.first <= trace.tensors[x].born <= block.last and x not in block.outputs
    settled = last_change(trace).get(x, -1) <= trace.saves[numbers[0]].packed
    return inside and settled and set(numbers) <= set(block.saves) and trace.tensors[x].freed is not None


def last_change(trace: Trace) -> dict[TensorId, OpId]:
    """Tensor -> the last op of forward that changes it in place."""
    return once_per_trace(
        trace, "_last_change", lambda t: {x: op.id for op in t.ops if op.site.phase is Phase.FORWARD for x in op.mutates}
    )


def last_reader(trace: Trace) -> dict[TensorId, int]:
    """Tensor -> the last block that it is an input of."""
    return once_per_trace(trace, "_last_reader", lambda t: {x: b.id for b in t.blocks for x in b.inputs})


def holding_blocks(trace: Trace) -> dict[int, int]:
    """Index of a save -> the block that made it."""
    return once_per_trace(trace, "_holding_blocks", lambda t: {n: b.id for b in t.blocks for n in b.saves})


def saved_as(trace: Trace) -> dict[TensorId, list[int]]:
    """Tensor -> indices of its saves."""
    return once_per_trace(trace, "_saved_as", _saved_as)


def _saved_as(trace: Trace) -> dict[TensorId, list[int]]:
    found: dict[TensorId, list[int]] = {}
    for n, save in enumerate(trace.saves):
        found.setdefault(save.tensor, []).append(n)
    return found


def _coding(problem: Problem, verb: str, source: TensorId, target: TensorId, nbytes: int) -> Run:
    hardware = problem.hardware
    return Run(
        op=-1,
        reads=(source,),
        writes=(target,),
        seconds=_PASSES * nbytes / hardware.bandwidth + hardware.overhead,
        workspace=nbytes if hardware.device == "cuda" else 0,
        name=verb,
    )


def _insert_after_waits(schedule: Schedule, op: OpId, step: Copy) -> None:
    """Put a copy after an op, behind the waits that were put first there: a layer synchronises, then the next fetch begins."""
    there = schedule.after.get(op, [])
    lead = next((n for n, s in enumerate(there) if not isinstance(s, Wait)), len(there))
    schedule.after[op] = [*there[:lead], step, *there[lead:]]
