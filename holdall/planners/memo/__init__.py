"""Memo: at long context, swap a fraction alpha of each layer's tokens and recompute the others.

Zhao et al., "MEMO: Fine-grained Tensor Management For Ultra-long Context LLM Training" (SIGMOD 2025, arXiv 2407.12117). With
fused attention, computation grows with the square of the sequence and saved bytes only with its length, so that a long
sequence hides the copies. In every layer but the last two:

- the layer's input and the results of attention are always offloaded; attention never runs twice;
- of the other tensors, the matrix products are divided by tokens: the first alpha of the rows are offloaded, the others are
  recomputed (`actions/recompute_rows.py`); norms, activation functions and rotations follow from these, for all tokens;
- results of random ops (dropout) are offloaded whole.

alpha is the largest value in [0, 1] with  S_in + S_attn + alpha * S_oth <= link rate * seconds of a layer's forward,  and
(layers - 2) * (S_in + S_attn + alpha * S_oth) <= host bytes.  The two rounding buffers are the schedule's waits: a layer's rows
have left when the next layer is over, before the one after begins, and come back while the next layer's backward runs.

`addresses` plans static addresses for the step in two levels (`addresses.py`) and reports their peak. They are not replayed:
PyTorch's allocator places the tensors.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from holdall.actions.offload import Offload
from holdall.actions.recompute_rows import RecomputeRows, products
from holdall.actions.reschedule import Reschedule
from holdall.actions.reschedule.op_graph import keeping
from holdall.cost.link import link_rate
from holdall.errors import InvalidInput
from holdall.planners.memo.addresses import AddressPlan, Life, in_two_levels
from holdall.planning.attention import attentions
from holdall.planning.finish import finish
from holdall.planning.segments import saving
from holdall.simulator import close, lower
from holdall.types import Action, Block, Copy, Drop, Plan, Problem, Run, Trace
from holdall.units import format_bytes

LAST = 2  # layers that never leave the device


@dataclass(frozen=True, kw_only=True)
class Memo:
    alpha: float | None = None  # the fraction of tokens to offload; None: by the closed form
    addresses: bool = False  # plan static addresses too, and report their peak

    name: ClassVar[str] = "memo"
    paper: ClassVar[str] = "Zhao et al., SIGMOD 2025, arXiv 2407.12117"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InvalidInput(f"`alpha` is {self.alpha}", hint="use a fraction from 0 to 1, or None for the closed form")
        trace = problem.trace
        can = problem.hardware.far is not None and problem.permits(Offload) and problem.permits(RecomputeRows)
        programs = {b.name: p for b in layers_of(trace)[:-LAST] if (p := program_of(trace, b)) is not None} if can else {}
        sizes = [sizes_of(problem, program) for program in programs.values()]
        alpha = self.alpha if self.alpha is not None else min((alpha_of(problem, s, len(sizes)) for s in sizes), default=0.0)
        actions: list[Action] = []
        for name, program in programs.items():
            actions.append(RecomputeRows.of(trace, program, alpha, overlap=problem.hardware.overlap))
            actions.append(Offload.of(trace, trace.block(name), overlap=problem.hardware.overlap))
        why = [f"{len(programs)} layers: {alpha:.3f} of the rows of their products are offloaded, the others recomputed"]
        if self.addresses:
            placed = planned_addresses(problem, actions)
            sizes_said = f"{format_bytes(placed.peak)} for {format_bytes(placed.bound)} that are alive"
            why.append(f"static addresses in two levels take {sizes_said}")
        return finish(self, problem, actions, why=why, began=began)


class LayerSizes(NamedTuple):
    """Bytes of a layer's input, of attention's results and of products that may be divided, and seconds of its forward."""

    input: int
    attention: int
    other: int
    seconds: float


def largest_alpha(*, always: float, other: float, hidden: float, host: float, layers: int) -> float:
    """The largest fraction that one layer's forward hides and that the host has room for.

    `always`: bytes of a layer that leave in any case; `other`: bytes of which a fraction leaves; `hidden`: bytes that the link
    moves during a layer's forward; `layers`: those that leave.
    """
    if other <= 0:
        return 0.0
    most = min(hidden, host / layers if layers else hidden)
    return min(1.0, max(0.0, (most - always) / other))


def alpha_of(problem: Problem, sizes: LayerSizes, layers: int) -> float:
    far = problem.other()
    return largest_alpha(
        always=sizes.input + sizes.attention,
        other=sizes.other,
        hidden=link_rate(problem.hardware, problem.home, far) * sizes.seconds,
        host=problem.limit(far),
        layers=layers,
    )


def layers_of(trace: Trace) -> list[Block]:
    """The blocks of the kind that saves most bytes: the stack of layers."""
    held: dict[str, int] = defaultdict(int)
    blocks = saving(trace)
    for block in blocks:
        held[block.kind] += sum(trace.tensors[trace.saves[i].tensor].nbytes for i in block.saves)
    return [b for b in blocks if b.kind == max(held, key=lambda kind: held[kind])]


def program_of(trace: Trace, block: Block) -> Reschedule | None:
    """The block with its input, the results of attention and of random ops kept; None: it cannot run op by op."""
    return keeping(trace, block, kept_of(trace, block))


def kept_of(trace: Trace, block: Block) -> set[int]:
    saved = {trace.saves[i].tensor for i in block.saves}
    inside = trace.ops[block.first : block.last + 1]
    drawn = {x for op in inside if op.random for x in (*op.writes, *op.mutates) if x in saved}
    of_attention = {x for core in attentions(trace, block) for op in core.inside for x in op.writes if x in saved}
    return drawn | of_attention


def sizes_of(problem: Problem, program: Reschedule) -> LayerSizes:
    trace = problem.trace
    block = trace.block(program.block)
    size = {x: t.nbytes for x, t in trace.tensors.items()}
    own = [block.inputs[i] for i in Offload.of(trace, block, overlap=False).inputs]
    return LayerSizes(
        input=sum(size[x] for x in own),
        attention=sum(size[x] for x in kept_of(trace, block)),
        other=sum(size[op.writes[0]] for op in products(trace, program).values()),
        seconds=sum(op.seconds for op in trace.ops[block.first : block.last + 1]),
    )


def planned_addresses(problem: Problem, actions: Sequence[Action]) -> AddressPlan:
    """Two-level addresses for everything on the device but what is there before the step."""
    layers, rest = lifetimes(problem, actions)
    return in_two_levels(layers, rest)


def lifetimes(problem: Problem, actions: Sequence[Action]) -> tuple[list[list[Life]], list[Life]]:
    """The stays of tensors on the device: those inside one pass of one layer, by layer and pass, and the others."""
    trace = problem.trace
    schedule = lower(problem, actions)
    windows = [(b.first, b.last) for b in layers_of(trace)]
    for block in layers_of(trace):
        if ids := [op.id for op in trace.backward_of(block.module)]:
            windows.append((min(ids), max(ids)))
    begun: dict[int, tuple[int, int]] = {}  # tensor -> step and op at which its stay began
    inside: list[list[Life]] = [[] for _ in windows]
    rest: list[Life] = []
    op = -1
    for n, step in enumerate(close(schedule)):
        if isinstance(step, Run):
            op = step.op if step.op >= 0 and not step.again else op
            begun.update(dict.fromkeys(step.writes, (n, op)))
        elif isinstance(step, Copy) and step.lands and step.dst == schedule.home:
            begun.update(dict.fromkeys(step.tensors, (n, op)))
        elif isinstance(step, Drop) and step.tier == schedule.home and step.tensor in begun:
            first, since = begun.pop(step.tensor)
            life = Life(schedule.info(step.tensor).nbytes, first, n)
            at = next((w for w, (low, high) in enumerate(windows) if low <= since and op <= high), None)
            (rest if at is None else inside[at]).append(life)
    rest += [Life(schedule.info(x).nbytes, first, n) for x, (first, _) in begun.items()]
    return inside, rest
