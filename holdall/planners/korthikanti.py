"""Selective recompute: in every layer, recompute only the tensors that are large and cost few FLOPs.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198). In a layer whose
attention is written out, the scores, the softmax, its dropout mask and result grow with the square of the sequence and
cost few FLOPs: autograd releases only these, and they are recomputed from q, k and v, which stay. The core of attention is
found in the trace (`attention.py`), not by name.

Where attention is one fused kernel, nothing quadratic is saved. The same reasoning, most bytes for the fewest FLOPs, then
selects ops without matrix products: norms, activation functions, dropout, sums. Results of products and of attention stay.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.recompute import Recompute, keepable
from holdall.actions.reschedule.op_graph import keeping
from holdall.planning.attention import Attention, attentions
from holdall.planning.finish import finish
from holdall.planning.segments import runs
from holdall.types import Action, Block, Op, Plan, Problem, Trace
from holdall.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Korthikanti:
    name: ClassVar[str] = "korthikanti"
    paper: ClassVar[str] = "Korthikanti et al. 2022, arXiv 2205.05198"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        trace = problem.trace
        blocks = [block for row in runs(trace) for block in row]
        cores = {b.id: [a for a in attentions(trace, b) if not a.is_fused] for b in blocks}
        is_written_out = any(cores.values())
        chosen = {}
        for block in blocks:
            found = select_core(trace, block, cores[block.id]) if is_written_out else select_cheap(trace, block)
            if found is not None:
                chosen[block.id] = found
        actions = [_action(trace, b, chosen[b.id]) for b in blocks if b.id in chosen]
        why = [_why_core(trace, blocks, cores) if is_written_out else _why_cheap(trace, blocks)]
        gained = sum(s.gain for s in chosen.values())
        why.append(f"{len(chosen)} blocks save {format_bytes(gained)} in all")
        return finish(self, problem, actions, why=why, began=began)


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors that a block releases, the op results that it keeps for their replay, and the bytes gained."""

    only: tuple[int, ...]  # saved tensors, by number
    keep: tuple[str, ...]  # op results
    held: frozenset[int]  # of the tensors that the block makes, those still held for backward
    gain: int


def _action(trace: Trace, block: Block, found: Selection) -> Action:
    """Op by op, which runs only the ops that are needed; otherwise the block's own code, with kept results."""
    whole = Recompute.of(trace, [block], found.keep, only=found.only)
    return keeping(trace, block, found.held) or whole


def select_core(trace: Trace, block: Block, cores: Collection[Attention]) -> Selection | None:
    """Release what the core of attention makes, except its result."""
    made = {x for core in cores for op in core.inside if op.id != core.last.id for x in op.writes}
    barred = {op.id for core in cores for op in core.inside}
    saved = _saved(trace, block)
    dropped = made & set(saved)
    return _selection(trace, block, dropped, barred) if dropped else None


def select_cheap(trace: Trace, block: Block) -> Selection | None:
    """Release results of ops without FLOPs, up to the point of the block that gains most."""
    saved = _saved(trace, block)
    cheap = {x for op in trace.ops[block.first : block.last + 1] if not op.flops for x in op.writes if x in saved}
    best: Selection | None = None
    for until in sorted({k for x in cheap for k in saved[x]}):
        found = _selection(trace, block, {x for x in cheap if max(saved[x]) <= until}, frozenset())
        if found.gain > (best.gain if best else 0):
            best = found
    return best


def _selection(trace: Trace, block: Block, dropped: Collection[int], barred: Collection[int]) -> Selection:
    """Release these tensors without computing a product twice.

    The replay goes from the block's start to the last op that is needed. It reuses results that autograd saves anyway. A
    product whose result is not saved is kept, and tensors derived from it without FLOPs (a copy in another layout, a rotation)
    are released instead: the replay recomputes them on its way.
    """
    dropped = set(dropped)
    saved = _saved(trace, block)
    until = max(max(saved[x]) for x in dropped)
    ops = [op for op in trace.ops[block.first : until + 1] if op.id not in barred]
    can = {op.id: label for label, op in keepable(trace, block).items()}
    heavy = [op for op in ops if op.flops and op.id in can and not set(op.writes) <= set(saved)]
    for op in heavy:
        dropped |= {x for x in _follows(ops, op) if x in saved and max(saved[x]) <= until}
    free = [op for op in ops if op.id in can and op.writes and set(op.writes) <= set(saved) - dropped]
    only = tuple(n for n, i in enumerate(block.saves) if trace.saves[i].tensor in dropped)
    keep = tuple(can[op.id] for op in sorted([*heavy, *free], key=lambda op: op.id))
    extra = {x for op in heavy for x in op.writes if x not in saved}
    size = {x: trace.tensors[x].nbytes for x in dropped | extra}
    held = frozenset(saved) - dropped | extra
    return Selection(only, keep, held, sum(size[x] for x in dropped) - sum(size[x] for x in extra))


def _saved(trace: Trace, block: Block) -> dict[int, list[int]]:
    """Tensors that the block makes and autograd saves for it, outputs excepted -> the ops after which they were packed."""
    found: dict[int, list[int]] = {}
    for i in block.saves:
        save = trace.saves[i]
        if trace.tensors[save.tensor].born >= block.first and save.tensor not in block.outputs:
            found.setdefault(save.tensor, []).append(save.packed)
    return found


def _follows(ops: Collection[Op], op: Op) -> set[int]:
    """Tensors derived from an op's results without FLOPs."""
    found = set(op.writes)
    for later in ops:
        if later.id > op.id and not later.flops and found & set(later.reads):
            found.update(later.writes)
    return found - set(op.writes)


def _why_core(trace: Trace, blocks: Collection[Block], cores: dict[int, list[Attention]]) -> str:
    inside = [op for b in blocks for core in cores[b.id] for op in core.inside]
    made = {x for b in blocks for x in _saved(trace, b)}
    held = sum(trace.tensors[x].nbytes for op in inside for x in op.writes if x in made)
    flops = sum(op.flops for op in inside)
    all_held = sum(trace.tensors[x].nbytes for x in made)
    all_flops = sum(op.flops for b in blocks for op in trace.ops[b.first : b.last + 1])
    return (
        f"the core of attention holds {100 * held / max(1, all_held):.0f} % of the blocks' bytes "
        f"and costs {100 * flops / max(1, all_flops):.0f} % of their FLOPs: it is recomputed"
    )


def _why_cheap(trace: Trace, blocks: Collection[Block]) -> str:
    fused = sum(a.is_fused for b in blocks for a in attentions(trace, b))
    what = f"all {fused} attentions are fused" if fused else "there is no attention"
    return f"{what}, so nothing quadratic is saved: norms, activation functions, dropout and sums are recomputed instead"
