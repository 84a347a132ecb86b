"""A block (or the whole model) as the small graph of the op-level solvers, and their programs as an action.

Nodes are groups of ops that run together: ops in place with the tensors they change, and ops whose result only the next one
reads and backward never does. In backward, where nothing runs twice, ops that read nothing of the forward join the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.actions.reschedule.dag import Dag, Program
from holdall.actions.reschedule.min_cut import best_sets, telling
from holdall.types import Block, Kind, Op, Trace
from holdall.types.program import fault, groups, lazily

_SMALL = 64  # ops; in larger regions, backward ops are merged, which makes their inputs seem to live a little longer


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """The nodes of a region in the order of a plain step; an empty node without cost lies between forward and backward.

    Other nodes without ops stand for gradients that stay after the node before has run.
    """

    trace: Trace
    block: Block
    parts: tuple[tuple[int, ...], ...]  # op numbers of every node
    middle: int  # the node between forward and backward
    dag: Dag

    def action(self, program: Program) -> Reschedule:
        """The program as a `Reschedule` action."""
        at = program.index(self.middle)
        forward = [n for node in program[:at] for n in self.parts[node]]
        backward = [n for node in program[at + 1 :] for n in self.parts[node]]
        return Reschedule.of(self.trace, self.block, backward, forward)

    @cached_property
    def kept(self) -> int:
        """Bytes that the block holds between forward and backward if nothing is recomputed."""
        first = set(range(self.middle))
        return sum(self.dag.size[i] for i in first if any(u > self.middle for u in self.dag.users[i]))


def op_graph(trace: Trace, block: Block) -> OpGraph:
    """The graph of a block that has no obstacle (`actions.reschedule.obstacle`)."""
    ops, count = region(trace, block)
    forward = _merged(trace, ops[:count], {x for op in ops[count:] for x in op.reads})
    fine = len(ops) <= _SMALL
    backward = [(n,) for n in range(count, len(ops))] if fine else _runs(ops, count)
    middle = len(forward)
    needed_at_end = {x for op in ops[count:] for x in op.writes if _outlives(trace, x, ops)}
    parts: list[tuple[int, ...]] = [*forward, ()]
    for (
        part
    ) in backward:  # tensors that outlive the region get a node of their own, so that the node's other bytes can be freed
        parts += [part, ()] if any(x in needed_at_end for n in part for x in ops[n].writes) else [part]
    owner = {x: i for i, part in enumerate(parts) for n in part for x in ops[n].writes}
    cost, size, extra, deps = [], [], [], []
    users: dict[int, set[int]] = {}
    for i, part in enumerate(parts):
        for n in part:
            for x in (*ops[n].reads, *ops[n].mutates):
                users.setdefault(x, set()).add(i)
    outputs = {owner[x] for x in block.outputs if x in owner}
    for i, part in enumerate(parts):
        reads = {owner[x] for n in part for x in (*ops[n].reads, *ops[n].mutates) if x in owner} - {i}
        if i == middle:
            reads = outputs
        elif not part:
            reads = {i - 1}
        deps.append(tuple(sorted(reads)))
        cost.append(sum(ops[n].seconds for n in part))
        before = parts[i - 1] if not part and i > middle else ()
        kept = {x for n in (*part, *before) for x in ops[n].writes if x in needed_at_end}
        stays = {x for n in part for x in ops[n].writes if users.get(x, set()) - {i}} - kept
        size.append(sum(trace.tensors[x].nbytes for x in (stays if part else kept)))
        extra.append(max(0, _peak(trace, ops, part, stays | kept) - size[-1]) if part else 0)
    keep = frozenset(i for i, part in enumerate(parts) if not part and i > middle)
    dag = Dag(
        cost=tuple(cost),
        size=tuple(size),
        deps=tuple(deps),
        extra=tuple(extra),
        fixed=frozenset(range(middle, len(parts))),
        keep=keep,
    )
    return OpGraph(trace=trace, block=block, parts=tuple(parts), middle=middle, dag=dag)


def programs(trace: Trace, block: Block, *, most: int = 12) -> list[tuple[int, ...]]:
    """Backward orders for the sets of results worth keeping, the rest recomputed; from few kept bytes to many."""
    graph = op_graph(trace, block)
    ops, count = region(trace, block)
    found = []
    for kept in telling(graph.dag, graph.middle, best_sets(graph.dag, graph.middle), most):
        tensors = frozenset(x for i in kept for n in graph.parts[i] for x in ops[n].writes)
        found.append(tuple(lazily(effects(ops), count, tensors)))
    plain = tuple(range(count, len(ops)))
    return [p for p in dict.fromkeys(found) if p != plain]


def keeping(trace: Trace, block: Block, held: Collection[int]) -> Reschedule | None:
    """The block op by op, saving only these results for backward. None: it cannot run op by op."""
    if obstacle(trace, block):
        return None
    ops, count = region(trace, block)
    backward = lazily(effects(ops), count, frozenset(held))
    return None if fault(effects(ops), count, range(count), backward) else Reschedule.of(trace, block, backward)


def _outlives(trace: Trace, x: int, ops: Sequence[Op]) -> bool:
    """Is it a gradient that leaves the region?"""
    inside = {op.id for op in ops}
    return trace.tensors[x].kind is Kind.GRAD or not set(trace.uses(x)) <= inside


def _merged(trace: Trace, ops: Sequence[Op], in_backward: Collection[int]) -> list[tuple[int, ...]]:
    """Forward nodes: ops that run together, merged with ops that only they read where that is no larger."""
    parts = [tuple(g) for g in groups(effects(ops))]
    merged = True
    while merged:
        merged = False
        owner = {x: i for i, part in enumerate(parts) for n in part for x in ops[n].writes}
        readers: dict[int, set[int]] = {}
        for i, part in enumerate(parts):
            for n in part:
                for x in (*ops[n].reads, *ops[n].mutates):
                    if x in owner and owner[x] != i:
                        readers.setdefault(owner[x], set()).add(i)
        for i, part in enumerate(parts):
            made = [x for n in part for x in ops[n].writes]
            if len(readers.get(i, ())) != 1 or any(x in in_backward for x in made):
                continue
            (j,) = readers[i]
            if j != i + 1 or _bytes(trace, ops, parts[j]) > _bytes(trace, ops, part):
                continue
            parts[j] = (*part, *parts[j])
            del parts[i]
            merged = True
            break
    return parts


def _runs(ops: Sequence[Op], count: int) -> list[tuple[int, ...]]:
    """Backward nodes: each begins with an op that reads a tensor of the forward."""
    of_forward = {x for op in ops[:count] for x in op.writes}
    parts: list[list[int]] = []
    for n in range(count, len(ops)):
        if not parts or any(x in of_forward for x in ops[n].reads):
            parts.append([])
        parts[-1].append(n)
    return [tuple(p) for p in parts]


def _bytes(trace: Trace, ops: Sequence[Op], part: Sequence[int]) -> int:
    return sum(trace.tensors[x].nbytes for n in part for x in ops[n].writes)


def _peak(trace: Trace, ops: Sequence[Op], part: Sequence[int], stays: set[int]) -> int:
    """The largest sum of a node's own tensors while it runs, each freed after its last use inside."""
    last = {x: n for n in part for x in (*ops[n].reads, *ops[n].mutates, *ops[n].writes)}
    live: set[int] = set()
    high = 0
    for n in part:
        live.update(ops[n].writes)
        high = max(high, sum(trace.tensors[x].nbytes for x in live) + ops[n].workspace)
        live = {x for x in live if x in stays or last[x] > n}
    return high
