"""Yuan et al.: offload a fraction alpha of every block's saved bytes, and recompute only norms and activation functions.

"Accelerating the Training of Large Language Models using Efficient Activation Rematerialization and Optimal Hybrid
Parallelism" (USENIX ATC 2024, kwai/Megatron-Kwai), on one rank: a block takes the place of the paper's stage chunk.

- Offload: a block's saved tensors, largest first (smallest first if alpha > 0.5), are one string of bytes. The first
  ceil(alpha * total) bytes, rounded up to 1 MiB, leave while the next block runs forward and come back while its backward runs;
  the tensor at the boundary is split. Tensors below 1 MiB are left alone, and so is the last block, whose backward follows at
  once.
- alpha is the smallest that fits, from a linear model of memory: (peak without offloading - budget) / bytes that may leave. The
  simulator corrects it to a 256th.
- Balanced checkpointing: results of norms and activation functions are not saved but recomputed in backward from tensors that
  are saved anyway. No matrix product, no attention and no random op runs twice.
- The search is over the checkpointing ("none", "balanced", "full", which recomputes blocks whole and offloads nothing), each
  with its alpha; the fastest that fits is taken.

The gap between forward and backward that a pipeline makes is `pipelines/swapping/yuan.py`'s. Not here: the search over tensor,
context and pipeline parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from holdall.actions.offload_share import OffloadShare, share_sizes
from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, region
from holdall.actions.reschedule.op_graph import keeping
from holdall.errors import InvalidInput
from holdall.planning.finish import finish, outcome_or_never
from holdall.planning.segments import runs, saving
from holdall.planning.state_planners import NOTHING, missing_bytes
from holdall.simulator import lower
from holdall.types import Action, Block, Kind, Outcome, Plan, Problem, Trace
from holdall.types.layout import round_up
from holdall.units import MiB, format_bytes

STEPS = 256  # alpha is a multiple of 1 / STEPS
CHECKPOINTS = ("none", "balanced", "full")


@dataclass(frozen=True, kw_only=True)
class Yuan:
    alpha: float | None = None  # the fraction to offload; None: the smallest that fits
    checkpoint: str = ""  # "none", "balanced" or "full"; empty: the fastest that fits
    grain: int = MiB  # bytes; offloaded bytes are a multiple of it, and smaller tensors stay

    name: ClassVar[str] = "yuan"
    paper: ClassVar[str] = "Yuan et al., USENIX ATC 2024"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        self._check()
        found: list[_Candidate] = []
        for done, kind in enumerate(CHECKPOINTS):
            if self.checkpoint in ("", kind) and (kind == "none" or problem.permits(Recompute)):
                problem.progress("trying checkpoints", done, len(CHECKPOINTS), kind)
                found.append(self._candidate(problem, kind))
                if not found[-1].missing and not found[-1].actions:
                    break  # plain training fits
        best = min(found, key=lambda c: (c.missing, c.outcome.seconds))
        return finish(self, problem, best.actions, why=best.why, began=began)

    def _check(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InvalidInput(
                f"`alpha` is {self.alpha}", hint="use a fraction from 0 to 1, or None for the smallest that fits"
            )
        if self.checkpoint not in ("", *CHECKPOINTS):
            raise InvalidInput(f"`checkpoint` is {self.checkpoint!r}", hint=f"use one of {', '.join(CHECKPOINTS)}")
        if self.grain < 1:
            raise InvalidInput(f"`grain` is {self.grain} bytes", hint="use 1 or more")

    def _candidate(self, problem: Problem, kind: str) -> _Candidate:
        trace = problem.trace
        base = checkpoints(trace, kind)
        may_leave = kind != "full" and problem.hardware.far is not None and problem.permits(OffloadShare)
        leaving = ByteShares(problem, base, self.grain) if may_leave else None
        total = sum(leaving.totals.values()) if leaving is not None else 0

        def with_share(step: float) -> list[Action]:
            return [*base, *(leaving.actions(step / STEPS) if leaving is not None else [])]

        def missing(step: int) -> int:
            return missing_bytes(problem, outcome_or_never(problem, with_share(step)))

        if not total:
            step: float = 0
        elif self.alpha is not None:
            step = self.alpha * STEPS
        else:
            step = smallest_step(missing, total)
        actions = with_share(step)
        outcome = outcome_or_never(problem, actions)
        why = (
            [f"checkpoint: {kind}", f"alpha is {step / STEPS:.3f} of {format_bytes(total)} that may leave"]
            if actions
            else [NOTHING]
        )
        return _Candidate(actions, outcome, missing_bytes(problem, outcome), why)


class _Candidate(NamedTuple):
    actions: list[Action]
    outcome: Outcome
    missing: int
    why: list[str]


class ByteShares:
    """The bytes of each block that may leave under these checkpoints; the last block's stay."""

    def __init__(self, problem: Problem, base: Sequence[Action], grain: int) -> None:
        trace, hardware = problem.trace, problem.hardware
        programs = lower(problem, base).programs
        self._trace, self._grain, self._overlap = trace, grain, hardware.overlap
        self.totals: dict[str, int] = {}
        for block in saving(trace)[:-1]:
            program = programs.get(block.id)
            sizes = share_sizes(trace, block, hardware, program.tensors if program else None, least=_least(grain))
            if sizes:
                self.totals[block.name] = sum(sizes.values())

    def nbytes(self, block: str, alpha: float) -> int:
        """Bytes of a block that leave."""
        total = self.totals[block]
        return min(total, round_up(-int(-alpha * total // 1), self._grain))

    def actions(self, alpha: float) -> list[Action]:
        return [
            OffloadShare.of(
                self._trace,
                self._trace.block(name),
                self.nbytes(name, alpha),
                overlap=self._overlap,
                smallest_first=alpha > 0.5,
                least=_least(self._grain),
            )
            for name in self.totals
            if alpha > 0
        ]


def _least(grain: int) -> int:
    return grain if grain > 1 else 0


def smallest_step(missing: Callable[[int], int], total: int) -> int:
    """The smallest multiple of alpha's step with which no bytes are missing; the last if there is none.

    The linear model's answer comes first. It is exact where the peak is where all blocks hold their saved tensors; otherwise
    the answer is found by bisection above it.
    """
    lacks = missing(0)
    if not lacks:
        return 0
    low, high = 0, min(STEPS, max(1, -(-lacks * STEPS // total)))  # low does not fit
    if not missing(high):
        while high - 1 > low and not missing(high - 1):  # rounding up to the grain frees more than the model says
            high -= 1
        return high
    low, high = high, STEPS
    if low >= high or missing(high):
        return STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if not missing(middle) else (middle, high)
    return high


def checkpoints(trace: Trace, kind: str) -> list[Action]:
    """The actions of one kind of checkpointing for every block that can have it."""
    if kind == "full":
        return [Recompute.of(trace, [block]) for row in runs(trace) for block in row]
    if kind == "balanced":
        return [program for block in saving(trace) if (program := balanced(trace, block)) is not None]
    return []


def balanced(trace: Trace, block: Block) -> Reschedule | None:
    """The block with norms and activation functions recomputed in backward; None: it cannot run op by op, or saves nothing."""
    saved = {trace.saves[i].tensor for i in block.saves}
    released = recomputable(trace, block) & saved
    program = keeping(trace, block, saved - released) if released else None
    if program is None:
        return None
    ops, count = region(trace, block)
    return None if any(ops[n].flops or ops[n].random for n in program.backward if n < count) else program


def recomputable(trace: Trace, block: Block) -> set[int]:
    """Tensors that follow without products and random numbers from others that are at hand in backward.

    At hand are weights, and what autograd saves of inputs, products and random ops. A result that does not follow from these,
    such as the sum of a residual and a product that nobody saves, is at hand if it is saved itself.
    """
    ops = trace.ops[block.first : block.last + 1]
    saved = {trace.saves[i].tensor for i in block.saves}
    changed = {x for op in ops for x in op.mutates}
    at_hand = {x for op in ops for x in op.reads if trace.tensors[x].born < 0 and trace.tensors[x].kind is not Kind.INPUT}
    at_hand |= {x for x in saved if not block.first <= trace.tensors[x].born <= block.last}
    found: set[int] = set()
    for op in ops:
        follows = not op.flops and not op.random and not changed & {*op.reads, *op.writes} and at_hand.issuperset(op.reads)
        for x in op.writes:
            if follows and x not in block.outputs:
                found.add(x)
                at_hand.add(x)
            elif x in saved:
                at_hand.add(x)
    return found
