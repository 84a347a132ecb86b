"""Head: compute the loss of a large vocabulary a few rows at a time, so that the whole logits never exist.

A chunked head has other ops, so the trace is already taken with the head chunked (`about.head` names it). The schedule needs
no change; installing the action chunks the head of the model.

A weight that the head shares with the embedding gets a gradient from both. A trace is taken under a dispatch mode, where
autograd never adds in place. On a GPU no mode is on in backward, and the sum goes into the first gradient if nothing else
refers to it. The chunked head's is such a one: its function made it in forward and has let go of it. (A plain linear layer's is
a transposed view, which autograd does not change.) On a CPU the ledger that measures memory is a mode itself, so a trace is
right as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.errors import Unsupported
from holdall.types import Facts, Op, Phase, Problem, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class Head(Facts):
    module: str  # path of the head
    rows: int  # rows per chunk

    name: ClassVar[str] = "head"
    exact: ClassVar[bool] = False  # the tolerance is in runtime/head/chunked_loss.py
    rank: ClassVar[int] = 5  # before the model is sharded: the weight must be a plain tensor then
    on_shards: ClassVar[bool] = True
    only_by_fit: ClassVar[bool] = True
    by_default: ClassVar[bool] = True

    @staticmethod
    def samples(trace: Trace) -> list[Head]:
        traced = _of(trace)
        return [] if traced is None else [traced]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        traced = _of(problem.trace)
        if traced != self:
            how = "whole" if traced is None else f"as `{traced.module}` in chunks of {traced.rows} rows"
            raise Unsupported(
                f"the plan chunks `{self.module}` by {self.rows} rows, but the trace has its head {how}",
                hint=f"trace with the head chunked alike: holdall.trace(..., head={self.rows})",
            )
        return schedule

    def install(self, harness: Harness) -> None:
        from holdall.runtime.head.lazy_logits import chunk_head  # planning needs no torch

        try:
            head = harness.model.get_submodule(self.module)
        except AttributeError:
            raise Unsupported(f"the model has no module `{self.module}`", hint="plan again for this model") from None
        harness.on_close(chunk_head(head, rows=self.rows))


def _of(trace: Trace) -> Head | None:
    """The chunked head of the trace, if it has one."""
    head = trace.about.head
    return None if head is None else Head(module=head.module, rows=head.rows)


def sum_in_place(trace: Trace) -> Trace:
    """A trace for a GPU with the sums of the gradients of shared weights made in place, if it has any."""
    for total in _gradients(trace):
        op = _sum(trace, total)
        first = None if op is None else _from_head(trace, op)
        if op is not None and first is not None:
            trace = _merged(trace, op, first, total)
    return trace


def _gradients(trace: Trace) -> list[int]:
    """The gradients of parameters; of a sharded model, which has no units, those before they are reduced."""
    if trace.about.shards is None:
        return [x for unit in trace.units for x in unit.grads]
    return [x for op in trace.ops if op.accumulates for x in op.writes]


def _sum(trace: Trace, total: int) -> Op | None:
    """The op of backward that adds two gradients of one weight; None: another op made it."""
    born = trace.tensors[total].born
    op = trace.ops[born] if born >= 0 else None
    return op if op is not None and op.site.phase is Phase.BACKWARD and op.site.op == "aten.add.Tensor" else None


def _from_head(trace: Trace, op: Op) -> int | None:
    """What the sum reads that was made in forward and is not read later: the chunked head's gradient."""
    for x in op.reads:
        info = trace.tensors[x]
        is_made_in_forward = info.born >= 0 and trace.ops[info.born].site.phase is Phase.FORWARD
        if is_made_in_forward and info.nbytes == trace.tensors[op.writes[0]].nbytes and trace.uses(x)[-1] == op.id:
            return x
    return None


def _merged(trace: Trace, op: Op, first: int, total: int) -> Trace:
    """`total` becomes what `first` is after the sum: one tensor, called by the gradient's name."""
    gone = trace.tensors[total]
    end = gone.freed

    def renamed(tensors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(first if x == total else x for x in tensors)

    def with_sum(old: Op) -> Op:
        if old is op:
            return replace(old, writes=tuple(x for x in old.writes if x != total), mutates=(*old.mutates, first))
        return replace(old, reads=renamed(old.reads), writes=renamed(old.writes), mutates=renamed(old.mutates))

    tensors = {x: info for x, info in trace.tensors.items() if x != total}
    tensors[first] = replace(tensors[first], name=gone.name, kind=gone.kind)
    saves = tuple(replace(s, tensor=first, released=end) if s.tensor in (first, total) else s for s in trace.saves)
    if not any(s.tensor == first for s in saves):
        tensors[first] = replace(tensors[first], freed=end)
    blocks = tuple(replace(b, inputs=renamed(b.inputs), outputs=renamed(b.outputs)) for b in trace.blocks)
    units = tuple(replace(u, grads=renamed(u.grads)) for u in trace.units)
    ops = tuple(with_sum(old) if old is op or total in (*old.reads, *old.writes, *old.mutates) else old for old in trace.ops)
    return replace(trace, ops=ops, tensors=tensors, saves=saves, blocks=blocks, units=units)
