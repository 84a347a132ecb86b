"""Liveness: which tensors each op of a step needs, which no later op needs, and the bytes that follow.

Computed offline from what ops read, make and change. A tensor is freed after the one op that uses it last, so a step's peak is
that of all live tensors, and no schedule needs less than the largest set that a single op works on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdall.types import Kind, Phase, Trace
from holdall.types.program import Effect


def operands(op: Effect) -> set[int]:
    """The tensors that an op works on."""
    return {*op.reads, *op.writes, *op.mutates}


def freed_after(ops: Sequence[Effect], stay: Collection[int] = ()) -> list[set[int]]:
    """For every op: the tensors that no later op needs, each once. `stay`: those that outlive the step."""
    found: list[set[int]] = []
    later = set(stay)
    for op in reversed(ops):
        found.append(operands(op) - later)
        later |= operands(op)
    return found[::-1]


def peak(ops: Sequence[Effect], sizes: Mapping[int, int], there: Collection[int] = (), stay: Collection[int] = ()) -> int:
    """The most bytes at once. `there`: tensors from before the step; those that no op uses stay as long as it takes."""
    live = {*there}
    most = sum(sizes[x] for x in live)
    for op, gone in zip(ops, freed_after(ops, stay), strict=True):
        live |= operands(op)
        most = max(most, sum(sizes[x] for x in live))
        live -= gone
    return most


def largest_working_set(trace: Trace) -> int:
    """The paper's l_peak: the most bytes of activations that one op of backward works on. States are on the device anyway."""
    states = (Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.BUFFER)
    counted = {x: 0 if info.kind in states else info.nbytes for x, info in trace.tensors.items()}
    backward = (op for op in trace.ops if op.site.phase is Phase.BACKWARD)
    return max((sum(counted[x] for x in {*op.reads, *op.writes, *op.mutates}) for op in backward), default=0)
