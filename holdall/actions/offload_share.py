"""OffloadShare: offload so many bytes of a block's saved tensors, and keep the rest on the device.

Yuan et al. (USENIX ATC 2024): the saved tensors of a block are laid out as one string of bytes, and its first bytes are copied
to another tier after the block's forward. The tensor at the boundary is split: its head leaves, its tail is cloned and stays.
Memory can so be tuned to the byte. The tensors come back together, the split one into one piece of memory.

On a block that runs by a program, the tensors are those that the program keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.compress import held_outside
from holdall.actions.offload import Offload, first_needed, own_inputs
from holdall.types import Block, Copy, Facts, Hardware, Kind, Problem, Run, Schedule, Step, TensorInfo, Trace, Wait
from holdall.types.layout import allocated_bytes, element_bytes, leading_bytes
from holdall.types.trace import TensorId

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class OffloadShare(Facts):
    block: str
    nbytes: int  # that leave
    smallest_first: bool = False  # the order of the tensors in the string of bytes; otherwise the largest come first
    inputs: tuple[int, ...] = ()  # positions of inputs that no other block needs
    lag: bool = False  # as in offload: free the device's copy when the next block's forward is over
    fetch: str = ""  # as in offload: start the fetch when the backward of this block begins
    tier: str = ""  # destination of the bytes; empty: the nearest tier
    least: int = 0  # bytes; smaller tensors are not in the string

    name: ClassVar[str] = "offload_share"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 21
    alone: ClassVar[bool] = True
    beside: ClassVar[frozenset[str]] = frozenset({"reschedule"})  # bytes that a program keeps may be offloaded
    spares_activations: ClassVar[bool] = True
    permitted_by: ClassVar[frozenset[str]] = frozenset({"offload"})  # it is offloading of fewer bytes
    what: ClassVar[str] = "a share of the saved bytes is copied to the next tier"

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({self.tier})

    @staticmethod
    def of(
        trace: Trace, block: Block, nbytes: int, *, overlap: bool, smallest_first: bool = False, least: int = 0
    ) -> OffloadShare:
        """The action for a block of a trace; `overlap`: copies overlap computation."""
        whole = Offload.of(trace, block, overlap=overlap)
        return OffloadShare(
            block=block.name,
            nbytes=nbytes,
            smallest_first=smallest_first,
            inputs=whole.inputs,
            lag=whole.lag,
            fetch=whole.fetch,
            least=least,
        )

    @staticmethod
    def samples(trace: Trace) -> list[OffloadShare]:
        """Shares that split a tensor, without and with overlap, in both orders; and one of a byte."""
        saving = [b for b in trace.blocks if b.saves and b.backward is not None]
        able = [b for b in saving if _candidates(trace, b, own_inputs(trace, b))][:2]
        found = []
        for n, block in enumerate(able):
            total = sum(trace.tensors[x].nbytes for x in _candidates(trace, block, own_inputs(trace, block)))
            sizes = (total // 2 + 1, 1) if n == 0 else (total // 3,)
            found += [OffloadShare.of(trace, block, size, overlap=bool(n), smallest_first=bool(n)) for size in sizes]
        return found

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace, tier = problem.trace, problem.other(self.tier)
        block = trace.block(self.block)
        program = schedule.programs.get(block.id)
        heads = self.heads(trace, block, problem.hardware, program.tensors if program else None)
        whole = tuple(x for x, size in heads.items() if size == raw_bytes(trace.tensors[x], problem.hardware))
        needed = program.until if program else first_needed(trace, block, heads)
        if not heads or needed is None:
            return schedule
        schedule = schedule.copy()
        out: list[Step] = []
        back: list[Step] = []
        moved = list(heads)
        if whole:
            out.append(Copy(tensors=whole, src=schedule.home, dst=tier, name=self.block))
            back.append(Copy(tensors=whole, src=tier, dst=schedule.home, name=self.block))
        for x in heads.keys() - set(whole):
            split = _Split(schedule, x, heads[x], block, problem.hardware)
            moved.append(split.head)
            out = [split.divide(), *out, split.leave(tier, self.block)]
            back += [split.join(), split.come(tier, self.block)]
        wait = Wait(tensors=tuple(moved))
        schedule.insert(block.last, out, first=True)  # before the waits for an earlier block's copies
        after = trace.blocks[block.id + 1].last if self.lag and block.id + 1 < len(trace.blocks) else block.last
        schedule.insert(after, [wait])
        fetched = trace.block(self.fetch).backward if self.fetch else None
        if fetched is not None and fetched < needed:
            schedule.insert(needed, [wait], first=True)
            schedule.insert(fetched, back, first=True)
        else:
            schedule.insert(needed, [*back, wait], first=True)
        return schedule

    def heads(
        self, trace: Trace, block: Block, hardware: Hardware, kept: Iterable[TensorId] | None = None
    ) -> dict[TensorId, int]:
        """The tensors of which bytes leave, and how many. `kept`: tensors that the block's program keeps."""
        sizes = share_sizes(trace, block, hardware, kept, inputs=self.inputs, least=self.least)
        leading = leading_bytes(list(sizes.values()), self.nbytes, smallest_first=self.smallest_first)
        return {x: size for x, size in zip(sizes, leading, strict=True) if size}

    def install(self, harness: Harness) -> None:
        from holdall.runtime.activations.offload_share import SharePart

        part = SharePart(
            nbytes=self.nbytes,
            smallest_first=self.smallest_first,
            least_bytes=self.least,
            inputs=frozenset(self.inputs),
            lag=self.lag,
            fetch=self.fetch,
            tier=self.tier,
        )
        harness.policy(self.block).offloads.append(part)


class _Split:
    """The tensor at the boundary in the schedule: its head in the other tier, its tail on the device."""

    def __init__(self, schedule: Schedule, whole: TensorId, size: int, block: Block, hardware: Hardware) -> None:
        info = schedule.info(whole)
        rest = raw_bytes(info, hardware) - size
        self._home, self._whole = schedule.home, whole
        self._given = held_outside(schedule, block)
        self._seconds = 2 * rest / hardware.bandwidth + hardware.overhead
        made = {"kind": Kind.ACTIVATION, "shape": (), "dtype": "uint8", "born": block.last, "freed": block.last}
        self.head = schedule.add(info, name=f"head of {info.name}", nbytes=size, **made)
        tail = allocated_bytes(rest, hardware.device)
        self._tail = schedule.add(info, name=f"tail of {info.name}", nbytes=tail, **made)

    def divide(self) -> Run:
        reads = dict.fromkeys((self._whole, *self._given))
        return Run(op=-1, reads=tuple(reads), writes=(self._tail,), seconds=self._seconds, name="clone a tail")

    def leave(self, tier: str, name: str) -> Copy:
        """The head has no memory of its own on the device: it is copied from the whole tensor, and back into it."""
        return Copy(tensors=(self.head,), src=self._home, dst=tier, uses=(self._whole,), aside=True, name=name)

    def join(self) -> Run:
        return Run(op=-1, reads=(self._tail,), writes=(self._whole,), seconds=self._seconds, name="put a tail back")

    def come(self, tier: str, name: str) -> Copy:
        uses = (self._whole,)
        return Copy(tensors=(self.head,), src=tier, dst=self._home, uses=uses, aside=True, lands=False, name=name)


def share_sizes(
    trace: Trace,
    block: Block,
    hardware: Hardware,
    kept: Iterable[TensorId] | None = None,
    *,
    inputs: Sequence[int] | None = None,
    least: int = 0,
) -> dict[TensorId, int]:
    """The tensors of a block that may leave, with their bytes. `kept`: those of its program."""
    found = _candidates(trace, block, own_inputs(trace, block) if inputs is None else inputs, kept)
    sizes = {x: raw_bytes(trace.tensors[x], hardware) for x in found}
    return {x: size for x, size in sizes.items() if size >= least}


def raw_bytes(info: TensorInfo, hardware: Hardware) -> int:
    """Bytes of a storage before a GPU's allocator rounds them up."""
    asked = element_bytes(info.shape, info.dtype)
    return asked if allocated_bytes(asked, hardware.device) == info.nbytes else info.nbytes


def _candidates(trace: Trace, block: Block, inputs: Sequence[int], kept: Iterable[TensorId] | None = None) -> list[TensorId]:
    """Tensors that may leave, in autograd's order: those that the block makes and saves, and its own inputs."""
    own = {block.inputs[i] for i in inputs if i < len(block.inputs)}
    saved = dict.fromkeys(sorted(kept) if kept is not None else (trace.saves[i].tensor for i in block.saves))
    return [x for x in saved if x in own or (block.first <= trace.tensors[x].born <= block.last and x not in block.outputs)]
