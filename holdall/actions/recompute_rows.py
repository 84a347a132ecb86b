"""RecomputeRows: run a block by a program; of the matrix products that it recomputes, offload the first rows instead.

The token-wise action of Memo (arXiv 2407.12117). Rows of a product are tokens, and each depends on the same row of its left
factor only. So the first rows of a product's result are copied to another tier after the block's forward, and backward
recomputes the others: it takes memory for the whole result, puts the fetched rows first and multiplies the rest of the left
factor into its place. Everything else is as the program says; tensors that it keeps may be offloaded besides.

A product of fewer rows may be summed in another order. On a CPU the first one of each shape is compared with the whole product,
and where a bit differs, products of this shape are recomputed whole: then the rows were fetched in vain, and results are exact.
On a GPU the last bits may differ from those of the whole product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.offload import Offload
from holdall.actions.reschedule import Reschedule, region
from holdall.errors import InvalidInput
from holdall.types import Block, Copy, Facts, Hardware, Kind, Op, Problem, Run, Schedule, Trace, Wait
from holdall.types.layout import allocated_bytes, element_bytes

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

PRODUCTS = ("aten.mm.default", "aten.addmm.default")


@dataclass(frozen=True, kw_only=True)
class RecomputeRows(Facts):
    block: str
    program: Reschedule
    ops: tuple[int, ...] = ()  # numbers of products of the forward that the program recomputes
    rows: tuple[int, ...] = ()  # of each, the rows that leave
    lag: bool = False  # as in offload: free the device's copy when the next block's forward is over
    fetch: str = ""  # as in offload: start the fetch when the backward of this block begins
    tier: str = ""  # destination of the rows; empty: the nearest tier

    name: ClassVar[str] = "recompute_rows"
    exact: ClassVar[bool] = False  # on a GPU, by the order of sums in a product; see above
    rank: ClassVar[int] = 6
    by_default: ClassVar[bool] = True
    alone: ClassVar[bool] = True
    beside: ClassVar[frozenset[str]] = frozenset({"offload"})  # tensors that the program keeps may be offloaded
    spares_activations: ClassVar[bool] = True
    permitted_by: ClassVar[frozenset[str]] = frozenset({"recompute"})
    what: ClassVar[str] = "some rows of matrix products are recomputed, the others are copied to the next tier"

    @property
    def by_ops(self) -> tuple[str, ...]:
        return (self.block,)

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({self.tier} if any(self.rows) else ())

    @staticmethod
    def of(trace: Trace, program: Reschedule, alpha: float, *, overlap: bool) -> RecomputeRows:
        """The action that offloads this fraction of the rows of every product that the program recomputes."""
        block = trace.block(program.block)
        whole = Offload.of(trace, block, overlap=overlap)
        found = {n: int(alpha * trace.tensors[op.writes[0]].shape[0]) for n, op in products(trace, program).items()}
        found = {n: rows for n, rows in found.items() if rows}
        return RecomputeRows(
            block=block.name,
            program=program,
            ops=tuple(found),
            rows=tuple(found.values()),
            lag=whole.lag,
            fetch=whole.fetch,
        )

    @staticmethod
    def samples(trace: Trace) -> list[RecomputeRows]:
        """Half of the rows of a block's products without overlap, and most of them with overlap."""
        found: list[RecomputeRows] = []
        for block in trace.blocks:
            for program in Reschedule.samples_of(trace, [block])[:1]:
                late = bool(found)
                action = RecomputeRows.of(trace, program, 0.8 if late else 0.5, overlap=late)
                found += [action] if action.ops else []
        return found[:2]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace, tier, hardware = problem.trace, problem.other(self.tier), problem.hardware
        block = trace.block(self.block)
        known = products(trace, self.program)
        wrong = [n for n in self.ops if n not in known]
        if wrong or len(self.ops) != len(self.rows):
            raise InvalidInput(
                f"`{self.block}`: op {wrong[:1] or len(self.ops)} is no product that the program recomputes, with its rows",
                hint="plan again: holdall.plan(trace, ...)",
            )
        schedule = self.program.rewrite(schedule, problem)
        if not self.ops:
            return schedule
        heads: dict[int, int] = {}  # product's result -> its first rows
        for n, rows in zip(self.ops, self.rows, strict=True):
            (result,) = known[n].writes
            heads[result] = self._head(schedule, block, result, rows, hardware)
            self._fill(schedule, known[n], heads[result], rows, hardware)
        moved = tuple(heads.values())
        out = Copy(tensors=moved, src=schedule.home, dst=tier, uses=tuple(heads), aside=True, name=self.block)
        back = Copy(tensors=moved, src=tier, dst=schedule.home, name=self.block)
        schedule.insert(block.last, [out])
        after = trace.blocks[block.id + 1].last if self.lag and block.id + 1 < len(trace.blocks) else block.last
        schedule.insert(after, [Wait(tensors=(*moved, *heads))])  # the results stay until their rows have left
        needed = schedule.programs[block.id].until
        fetched = trace.block(self.fetch).backward if self.fetch else None
        if fetched is not None and fetched < needed:
            schedule.insert(needed, [Wait(tensors=moved)], first=True)
            schedule.insert(fetched, [back], first=True)
        else:
            schedule.insert(needed, [back, Wait(tensors=moved)], first=True)
        return schedule

    def _head(self, schedule: Schedule, block: Block, result: int, rows: int, hardware: Hardware) -> int:
        info = schedule.trace.tensors[result]
        size = allocated_bytes(row_bytes(schedule.trace, result) * rows, hardware.device)
        name, shape = f"first rows of {info.name}", (rows, *info.shape[1:])
        return schedule.add(info, name=name, kind=Kind.ACTIVATION, shape=shape, nbytes=size, born=block.last, freed=block.last)

    def _fill(self, schedule: Schedule, op: Op, head: int, rows: int, hardware: Hardware) -> None:
        """The repeated product reads the fetched rows, and takes the time of the other rows and of copying these."""
        info = schedule.trace.tensors[op.writes[0]]
        seconds = op.seconds * (1 - rows / info.shape[0]) + 2 * info.nbytes * rows / info.shape[0] / hardware.bandwidth
        for at, steps in schedule.after.items():
            for i, step in enumerate(steps):
                if isinstance(step, Run) and step.op == op.id and step.again:
                    filled = replace(step, reads=(*step.reads, head), seconds=seconds)
                    schedule.after[at] = [*steps[:i], filled, *steps[i + 1 :]]
                    return

    def install(self, harness: Harness) -> None:
        from holdall.runtime.activations.recompute_rows import RowPart

        policy = harness.policy(self.block)
        policy.runner = self.program.runner(harness, rows=dict(zip(self.ops, self.rows, strict=True)))
        if self.ops:
            policy.offloads.append(RowPart(lag=self.lag, fetch=self.fetch, tier=self.tier))


def products(trace: Trace, program: Reschedule) -> Mapping[int, Op]:
    """The matrix products that the program recomputes once, by number; not the block's outputs, which others hold."""
    block = trace.block(program.block)
    ops, count = region(trace, block)
    again = [n for n in program.backward if n < count]
    found = {n: ops[n] for n in sorted(set(again)) if again.count(n) == 1 and ops[n].site.op in PRODUCTS}
    return {
        n: op for n, op in found.items() if op.writes[0] not in block.outputs and len(trace.tensors[op.writes[0]].shape) == 2
    }


def row_bytes(trace: Trace, result: int) -> int:
    """Bytes of a row of a product's result."""
    info = trace.tensors[result]
    return element_bytes(info.shape[1:], info.dtype)
