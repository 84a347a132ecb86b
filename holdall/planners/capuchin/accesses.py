"""The access pattern of a step: when each held tensor could leave, when it is needed again, and the free time between.

Times are those of the traced step without any waiting, as the paper corrects its log of the first iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdall.actions.offload import first_needed, own_inputs
from holdall.cost.link import copy_seconds
from holdall.types import Block, Problem, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A tensor between its evicted-access and its back-access, in seconds of the step."""

    evict: float
    back: float
    out: float  # seconds of its copy to the other tier
    into: float  # and of its copy back

    @property
    def out_end(self) -> float:
        return self.evict + self.out

    @property
    def in_start(self) -> float:
        return self.back - self.into

    @property
    def free_time(self) -> float:
        """Not negative: computation between the two accesses hides both copies."""
        return self.in_start - self.out_end


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor that a block holds for its backward and that no other block needs."""

    tensor: int
    block: int
    nbytes: int
    swap: Swap
    input: int | None = None  # its position among the block's inputs; None: the block makes it


def ends_of_ops(trace: Trace) -> list[float]:
    """When each op of the traced step ends; at -1: the beginning."""
    return [*accumulate(op.seconds for op in trace.ops), 0.0]


def holding(trace: Trace) -> list[Block]:
    """Blocks that hold tensors for a backward, in the order of forward."""
    return [b for b in trace.blocks if b.saves and b.backward is not None]


def candidates(problem: Problem) -> list[HeldTensor]:
    """Tensors that are accessed in forward and again in backward."""
    trace, ends = problem.trace, ends_of_ops(problem.trace)
    far = problem.hardware.far.name if problem.hardware.far is not None else problem.home
    found = []
    for block in holding(trace):
        own = {block.inputs[n]: n for n in own_inputs(trace, block)}
        for x in dict.fromkeys(trace.saves[n].tensor for n in block.saves):
            inside = block.first <= trace.tensors[x].born <= block.last and x not in block.outputs
            back = first_needed(trace, block, (x,))
            if not (inside or x in own) or back is None:
                continue
            size = trace.tensors[x].nbytes
            swap = Swap(
                evict=ends[block.last],
                back=ends[back],
                out=copy_seconds(size, problem.hardware, problem.home, far),
                into=copy_seconds(size, problem.hardware, far, problem.home),
            )
            found.append(HeldTensor(tensor=x, block=block.id, nbytes=size, swap=swap, input=own.get(x)))
    return found


def in_peak_window(trace: Trace, found: Sequence[HeldTensor]) -> list[HeldTensor]:
    """Candidates that lie in memory, unused, while the traced step needs most."""
    live = [0] * (len(trace.ops) + 2)
    for x, info in trace.tensors.items():
        live[max(0, info.born)] += info.nbytes
        live[min(trace.last_held[x], len(trace.ops)) + 1] -= info.nbytes
    needed = [total + op.workspace for total, op in zip(accumulate(live), trace.ops, strict=False)]
    peak = max(range(len(needed)), key=needed.__getitem__, default=0)
    at = ends_of_ops(trace)[peak]
    return [c for c in found if c.swap.evict <= at <= c.swap.back]
