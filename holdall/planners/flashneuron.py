"""FlashNeuron: activations go to a disk, from the first on, only as many as memory lacks and as the disk takes in time.

Bae et al., FAST 2021; scheduler after their code. Tensors are those that one layer last reads in forward (`layer_swap`).

1. Linear selection: the shortest run of saved tensors, from the first, that covers the shortage. Copies go one after the
   other; one that the disk is not ready for is delayed, and the delay is carried on.
2. If the last copy would end after the forward, the latest tensor that cannot be compressed is dropped, and later ones that can
   (results of ReLU and dropout, packed without zeros) take its place, until the copies end in time.

The destination is the tier `nvme` where the machine has it, or `tier`. A packed tensor is assumed to have half of its bytes, as
in the paper; the bytes of a run follow from its values. The simulator has the last word: if a plan does not fit, the shortage
grows by what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from holdall.actions.layer_swap import LayerSwap
from holdall.cost.link import copy_seconds
from holdall.errors import unknown_name
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.types import Action, Block, Phase, Plan, Problem, Trace
from holdall.types.layout import element_bytes
from holdall.types.trace import Bytes, Seconds, TensorId, once_per_trace
from holdall.units import MiB, format_bytes

COMPRESSION = ("none", "csr")
_DISK = "nvme"
_ROUNDS = 24
_DENSITY = 0.5  # assumed of packed tensors
_FLOATS = ("float32", "bfloat16", "float16")


class SavedTensor(NamedTuple):
    """A candidate, in the order of saving."""

    size: Bytes
    saved: Seconds  # after the beginning of the forward
    copy: Seconds  # of its transfer
    csr: bool = False  # it can be packed


class OffloadSelection(NamedTuple):
    chosen: tuple[int, ...]
    ends: tuple[Seconds, ...]  # of their copies
    is_late: bool  # the last copy ends after the forward


def select(tensors: Sequence[SavedTensor], shortage: Bytes, forward: Seconds) -> OffloadSelection:
    """The tensors to offload: both phases."""
    first = linear(tensors, shortage, forward)
    if not first.is_late:
        return first
    second = _in_time(tensors, first, shortage, forward)
    return second if sum(tensors[n].size for n in second.chosen) >= shortage else first


def linear(tensors: Sequence[SavedTensor], shortage: Bytes, forward: Seconds) -> OffloadSelection:
    """Phase 1: the shortest prefix that covers the shortage; all of them, if none does."""
    covered, count = 0, 0
    while covered < shortage and count < len(tensors):
        covered += tensors[count].size
        count += 1
    return _scheduled(tensors, range(count), forward)


def _scheduled(tensors: Sequence[SavedTensor], chosen: Sequence[int], forward: Seconds) -> OffloadSelection:
    ends: list[Seconds] = []
    free = 0.0
    for n in chosen:
        free = max(free, tensors[n].saved) + tensors[n].copy
        ends.append(free)
    return OffloadSelection(tuple(chosen), tuple(ends), free > forward)


def _in_time(tensors: Sequence[SavedTensor], first: OffloadSelection, shortage: Bytes, forward: Seconds) -> OffloadSelection:
    """Phase 2: drop the latest that cannot be packed, and add later ones that can."""
    chosen = set(first.chosen)
    packable = [n for n, tensor in enumerate(tensors) if tensor.csr and n not in chosen]
    found = first
    while found.is_late:
        dropped = max((n for n in chosen if not tensors[n].csr), default=None)
        if dropped is None:
            break
        chosen.discard(dropped)
        missing = shortage - sum(tensors[n].size for n in chosen)
        while missing > 0 and packable:
            chosen.add(packable[0])
            missing -= tensors[packable.pop(0)].size
        found = _scheduled(tensors, sorted(chosen), forward)
        if missing > 0:
            break
    return found


@dataclass(frozen=True, kw_only=True)
class Flashneuron:
    compress: str = "csr"  # pack results of ReLU and dropout where copies would be late; "none": never
    tier: str = ""  # where tensors go; empty: the disk if there is one, else the nearest tier
    least: int | None = None  # bytes; smaller tensors stay; None: 1 MB, or a thousandth of all if that is less
    window: int = 2  # layers that a fetch is ahead of its use

    name: ClassVar[str] = "flashneuron"
    paper: ClassVar[str] = "Bae et al., FAST 2021"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.compress not in COMPRESSION:
            raise unknown_name("compression of flashneuron", self.compress, COMPRESSION)
        plain = outcome_or_never(problem, [])
        missing = over_budget(problem, plain).get(problem.home, 0)
        if not missing or not problem.permits(LayerSwap) or not problem.hardware.others:
            return finish(self, problem, [], began=began)
        tier = problem.other(self.tier or next((t.name for t in problem.hardware.others if t.name == _DISK), ""))
        step = _Step(problem, tier, self)
        actions, selection = self._search(problem, step, missing)
        size = sum(step.tensors[n].size for n in selection.chosen)
        late = "; the last copy ends after the forward" if selection.is_late else ""
        why = [f"{len(selection.chosen)} of {len(step.tensors)} tensors, {format_bytes(size)}, go to {tier}{late}"]
        return finish(self, problem, actions, why=why, began=began)

    def _search(self, problem: Problem, step: _Step, missing: Bytes) -> tuple[list[Action], OffloadSelection]:
        """The selection for a shortage that grows until the plan fits; at last, copies out and then copies back are waited for
        at once."""
        for waits in range(3):
            shortage = missing
            for _ in range(_ROUNDS):
                selection = select(step.tensors, shortage, step.forward)
                actions = step.actions(selection, waits)
                excess = over_budget(problem, outcome_or_never(problem, actions)).get(problem.home, 0)
                if not excess or len(selection.chosen) == len(step.tensors):
                    break
                shortage += excess
            if not excess:
                break
        return actions, selection


def least_size(sizes: Sequence[int]) -> int:
    """Bytes up to which tensors stay: a thousandth of all, at most a MiB."""
    return min(MiB, sum(sizes) // 1000)


class _Step:
    """The tensors of a step that can leave, and the actions that let them."""

    def __init__(self, problem: Problem, tier: str, how: Flashneuron) -> None:
        self._problem, self._tier, self._how = problem, tier, how
        trace = self._trace = problem.trace
        self._blocks = [b for b in trace.blocks if b.backward is not None and b.saves]
        self._clock = once_per_trace(trace, "_seconds_before", _seconds_before)
        self.forward = self._clock[_end_of_forward(trace)]
        found: list[tuple[SavedTensor, TensorId, Block]] = []
        for block in self._blocks[:-1]:  # the last is needed at once
            swap = LayerSwap.of(trace, block)
            for x in swap.tensors(trace):
                found.append((self._tensor(x, block), x, block))
        found.sort(key=lambda f: f[0].saved)
        least = how.least if how.least is not None else least_size([t.size for t, _, _ in found])
        found = [f for f in found if f[0].size > least]
        self.tensors = [tensor for tensor, _, _ in found]
        self._which = [(x, block) for _, x, block in found]

    def _tensor(self, x: TensorId, block: Block) -> SavedTensor:
        trace, info = self._trace, self._trace.tensors[x]
        at = block.first if x in block.inputs else info.born + 1
        is_packed = self._how.compress == "csr" and info.dtype in _FLOATS and is_sparse(trace, x)
        copied = round(info.nbytes * _DENSITY) if is_packed else info.nbytes
        seconds = copy_seconds(copied, self._problem.hardware, self._problem.home, self._tier)
        return SavedTensor(info.nbytes, self._clock[at], seconds, is_packed)

    def actions(self, selection: OffloadSelection, waits: int) -> list[Action]:
        """One action for the tensors of a layer that leave, are freed and come back together. `waits`: 1, they are freed at the
        end of their layer; 2, they are also fetched when they are needed."""
        groups: dict[tuple[int, str, int], set[TensorId]] = {}
        for n, end in zip(selection.chosen, selection.ends, strict=True):
            x, block = self._which[n]
            until = "" if waits or not self._problem.hardware.overlap else self._at(end, block)
            width = element_bytes((1,), self._trace.tensors[x].dtype) if self.tensors[n].csr and selection.is_late else 0
            groups.setdefault((block.id, until, width), set()).add(x)
        made: list[Action] = []
        for (number, until, width), tensors in groups.items():
            block = self._trace.blocks[number]
            swap = LayerSwap.of(self._trace, block, only=tensors)
            made.append(
                replace(
                    swap,
                    until=until,
                    fetch="" if waits == 2 else self._fetch(block),
                    tier=self._tier,
                    packed=width,
                    density=_DENSITY,
                )
            )
        return made

    def _at(self, end: Seconds, block: Block) -> str:
        """The layer during whose forward a copy ends; empty: its own."""
        later = [b for b in self._blocks if b.id > block.id]
        found = next((b for b in later if self._clock[b.last + 1] >= end), later[-1] if later else block)
        return "" if end <= self._clock[block.last + 1] else found.name

    def _fetch(self, block: Block) -> str:
        if not self._problem.hardware.overlap:
            return ""
        later = [b for b in self._blocks if b.id > block.id][: self._how.window]
        return later[-1].name if later else ""


def is_sparse(trace: Trace, x: TensorId) -> bool:
    """Is the tensor a result of ReLU or dropout, or of pooling such a result?"""
    info = trace.tensors[x]
    changed = [op for op in trace.ops if op.site.phase is Phase.FORWARD and x in op.mutates]
    maker = changed[-1] if changed else trace.ops[info.born] if info.born >= 0 else None
    if maker is None:
        return False
    if "max_pool" in maker.site.op:
        return any(is_sparse(trace, y) for y in maker.reads)
    return any(word in maker.site.op for word in ("relu", "dropout", "threshold"))


def _seconds_before(trace: Trace) -> list[Seconds]:
    """Of all ops before each op; at the end: of all."""
    times = [0.0]
    for op in trace.ops:
        times.append(times[-1] + op.seconds)
    return times


def _end_of_forward(trace: Trace) -> int:
    return next((op.id for op in trace.ops if op.site.phase is not Phase.FORWARD), len(trace.ops))
