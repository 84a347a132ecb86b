"""Runs a captured block by a program: ops in any legal order, some repeated, each result freed at its last use.

`Program` pairs a `Graph` with two lists of op numbers, one for forward and one for backward. A forward op in the second list is
a recomputation. The tensors kept between the two, and every free, follow from the lists. Autograd sees one node per block, so
hooks, streamed weights and updates in backward work as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from holdall.errors import InvalidInput, Unsupported
from holdall.runtime.activations.layer_swap import SwappedSaves
from holdall.runtime.activations.offload import OffloadedSaves
from holdall.runtime.activations.recompute import Hooks, unpack
from holdall.runtime.activations.recompute_rows import RowEntry, fetch_all, take_heads, with_first_rows
from holdall.runtime.programs.capture import Graph, Instruction, Ref, Slot, refs_of, without_autocast
from holdall.runtime.programs.compiled import Compiler, in_layout
from holdall.runtime.programs.fx_function import plain_halves
from holdall.types.program import Effect, fault

Values = dict[Slot, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One execution of one op."""

    op: int
    again: bool
    keep_state: bool  # keep the generator's state: the op will be repeated
    frees: tuple[Slot, ...]  # storages not needed any more


class Program:
    """The ops to run and the frees between them. `compiler`: compiles each half into one function where possible. `rows`: first
    rows of recomputed products, by number, that come from another tier."""

    def __init__(
        self,
        graph: Graph,
        forward: Sequence[int],
        backward: Sequence[int],
        compiler: Compiler | None = None,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        self.graph = graph
        self.rows = dict(rows or {})
        self.divided = {n: graph.ops[n].makes[0][1] for n in self.rows}  # their results
        self._own = set(graph.made)
        made = [slot for op in graph.ops[: graph.forward] for _, slot in op.makes]
        self.numbers = {slot: number for number, slot in enumerate(made)}  # of what the forward makes, as plans name it
        ops = [Effect(op.reads, tuple(s for _, s in op.makes), op.mutates) for op in graph.ops]
        wrong = fault(ops, graph.forward, forward, backward)
        if wrong:
            raise InvalidInput(
                f"the plan holds an invalid program for a block: {wrong}",
                hint="make the plan again with `holdall.plan` or `holdall.fit`",
            )
        again_later = set(backward)
        last = {r.slot for r in graph.outputs if isinstance(r, Ref)}
        needed = self._needed_first(backward)
        self.saved: list[Slot] = sorted(needed & self._own)
        self.kept_inputs: list[Slot] = sorted(needed - self._own - set(graph.tangents) - set(graph.constants))
        own_changes = {s for op in graph.ops for s in op.mutates}  # buffers: repeated ops get copies of them
        self.watched = [s for s in self.kept_inputs if s not in own_changes]
        seen: set[int] = set()
        stay = [*self.saved, *self.divided.values()]
        self.forward = self._turns(forward, last | set(stay), seen, again_later)
        ends = {g.slot for g in graph.gradients if g is not None}
        self.backward = self._turns(backward, ends, seen, set())
        looks = refs_of([graph.gradients, *((op.args, op.kwargs) for op in graph.ops)])
        self.viewed = {r.slot for r in looks if r.size is not None}  # storages read through views
        orders = (forward, backward)
        self.halves = compiler.compile(graph, orders, self.saved) if compiler is not None and not self.rows else None
        self.is_compiled = self.halves is not None
        self.halves = self.halves or plain_halves(graph, orders, stay)
        self.checked = [False, False]  # has each half run op by op, every layout compared with the captured one?
        self.strange: set[Slot] = set()  # viewed storages that real kernels lay out otherwise than fake ones

    def _needed_first(self, order: Sequence[int]) -> set[Slot]:
        """Storages that the backward reads before it makes them."""
        made: set[Slot] = set()
        needed: set[Slot] = set()
        for n in order:
            op = self.graph.ops[n]
            needed |= {s for s in (*op.reads, *op.mutates) if s not in made}
            made |= {s for _, s in op.makes}
        needed |= {g.slot for g in self.graph.gradients if g is not None and g.slot not in made}
        return needed

    def _turns(self, order: Sequence[int], stay: set[Slot], seen: set[int], again_later: set[int]) -> list[_Turn]:
        turns: list[_Turn] = []
        wanted = set(stay)  # needed later, walking from the end
        frees: list[tuple[Slot, ...]] = []
        for n in reversed(order):
            op = self.graph.ops[n]
            made = {s for _, s in op.makes}
            touched = {*op.reads, *op.mutates, *made}
            frees.append(tuple(sorted(touched - wanted)))
            wanted = (wanted - made) | {*op.reads, *op.mutates}
        for n, free in zip(order, reversed(frees), strict=True):
            is_again = n in seen
            later = n in again_later and self.graph.ops[n].random
            turns.append(_Turn(n, is_again, later and not is_again, free))
            seen.add(n)
        return turns

    # running

    def __call__(
        self, inputs: Sequence[torch.Tensor], parking: OffloadedSaves | SwappedSaves | None = None, hooks: Hooks | None = None
    ) -> Any:
        """Run the forward; autograd knows how to come back. `parking`, `hooks`: take what is kept until then."""
        differentiable = [t for t in inputs if t.requires_grad]
        call = _Call(self, inputs)
        results = _Block.apply(call, *differentiable)
        if parking is not None:
            call.hand_over(lambda slot, t: parking.take(t, self.numbers.get(slot)))
            if self.rows and isinstance(parking, OffloadedSaves):
                call.heads, call.divided = take_heads(parking, call.divided, self.rows), {}
            parking.leave(results)
        elif hooks is not None:
            call.hand_over(lambda _, t: hooks[0](t))
        outputs = iter(results)
        leaves = [next(outputs) if isinstance(o, Ref) else o for o in self.graph.outputs]
        return tree_unflatten(leaves, self.graph.spec)


class _Call:
    """One call of a block, from its forward to its backward."""

    def __init__(self, program: Program, inputs: Sequence[torch.Tensor]) -> None:
        self.program = program
        self.inputs: Sequence[torch.Tensor] | None = inputs
        self.is_trained = [t.requires_grad for t in inputs]
        self.kept: dict[Slot, Any] = {}  # tensors, or placeholders while they are offloaded
        self.divided: dict[int, torch.Tensor] = {}  # products whose first rows leave, until the end of the forward
        self.heads: dict[int, RowEntry] = {}  # and those rows
        self.versions: dict[Slot, int] = {}
        self.states: dict[int, Any] = {}  # op -> generator state before its first run
        self.shifts: dict[Slot, int] = {}
        self.odd = set(
            program.strange
        )  # storages in another layout than captured: views of them are made by the model's own ops
        self.is_turned = False  # a gradient came in another layout: so may what is made of it
        graph = program.graph
        for slot, t, start in zip(graph.inputs, inputs, graph.starts, strict=True):
            if t.storage_offset() != start:
                self.shifts[slot] = int(t.storage_offset()) - start

    def forward(self) -> list[torch.Tensor]:
        program, graph = self.program, self.program.graph
        assert self.inputs is not None
        values: Values = {**graph.constants}
        for slot, t in zip(graph.inputs, self.inputs, strict=True):
            values.setdefault(slot, t.detach())
        self.inputs = None
        for slot in program.kept_inputs:
            self.kept[slot] = values[slot]
        self._run_half(0, values)
        for slot in program.saved:
            self.kept[slot] = values[slot].detach()  # detached: an output would form a cycle with this call
        self.divided = {n: values[slot].detach() for n, slot in program.divided.items()}
        self.versions = {s: self.kept[s]._version for s in program.watched}
        return [self._look(ref, values) for ref in graph.outputs if isinstance(ref, Ref)]

    def hand_over(self, pack: Callable[[Slot, torch.Tensor], Any]) -> None:
        """Let what is kept wait in another tier, or be made again by the segment around."""
        self.kept = {slot: pack(slot, t) for slot, t in self.kept.items()}
        self.versions = {s: v for s, v in self.versions.items() if isinstance(self.kept[s], torch.Tensor)}

    def backward(self, tangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        program, graph = self.program, self.program.graph
        if not self.kept and (program.saved or program.kept_inputs):
            raise Unsupported(
                "a second backward through a block that runs op by op",
                hint='call backward once per forward, or recompute whole blocks: fit(..., planner="chen")',
            )
        for slot, version in self.versions.items():
            if self.kept[slot]._version != version:
                raise RuntimeError("a tensor that a block needs for its backward has been changed in place since its forward")
        values: Values = {**graph.constants, **{slot: unpack(held) for slot, held in self.kept.items()}}
        self.kept = {}
        for slot, t in zip(graph.tangents, tangents, strict=True):
            values[slot] = self._as_captured(slot, t)
        fetch_all(self.heads.values())
        self._run_half(1, values)
        found: list[torch.Tensor | None] = []
        for ref, trained in zip(graph.gradients, self.is_trained, strict=True):
            if trained:
                found.append(None if ref is None else self._look(ref, values))
        return found

    def _as_captured(self, slot: Slot, tangent: torch.Tensor) -> torch.Tensor:
        """A gradient as the program can read it. A kernel may round otherwise for other strides, so it keeps its own; strides
        of the capture would then read other elements, and views of it are made by the model's own ops.
        """
        layout = self.program.graph.layouts[slot]
        if not layout.fits(tangent):
            if self.program.is_compiled:
                return in_layout(tangent, layout)
            self.is_turned = True
            if slot in self.program.viewed:
                self.odd.add(slot)
        self.shifts[slot] = int(tangent.storage_offset())
        return tangent

    def _view_of(self, ref: Ref, values: Values) -> torch.Tensor:
        """A view of a storage in another layout than captured; if the model's op cannot make it, of a copy in that layout."""
        view = self.program.graph.views.get(ref)
        if view is not None:
            with contextlib.suppress(RuntimeError):
                made = view.func(*self._fill(view.args, values), **self._fill(view.kwargs, values))
                return made if view.leaf is None else tree_leaves(made)[view.leaf]  # type: ignore[no-any-return]
        self.odd.discard(ref.slot)
        self.shifts.pop(ref.slot, None)
        values[ref.slot] = in_layout(values[ref.slot], self.program.graph.layouts[ref.slot])
        return self._look(ref, values)

    def _run_half(self, n: int, values: Values) -> None:
        """The forward (0) or the backward (1): by one function, or op by op where a layout may be another than captured.

        The first time it is op by op: kernels may return other strides than their fakes, and a view by the strides of the fake
        would read other elements.
        """
        program = self.program
        half = None if program.halves is None else (program.halves.forward, program.halves.backward)[n]
        is_as_captured = not (self.odd or self.is_turned) and (program.is_compiled or program.checked[n])
        with without_autocast():
            if half is not None and is_as_captured and not (n and program.rows) and half.run(values, self._look):
                return
            for turn in (program.forward, program.backward)[n]:
                self._run(turn, values)
        program.checked[n] |= not self.is_turned

    def _run(self, turn: _Turn, values: Values) -> None:
        op = self.program.graph.ops[turn.op]
        if turn.keep_state:
            self.states[turn.op] = _state(op.device)
        aside: Values = {}
        if turn.again and op.mutates:  # buffers have already changed; the program's own storages must change again
            for slot in op.mutates:
                if slot not in self.program.graph.made:
                    aside[slot] = values[slot]
                    values[slot] = values[slot].clone()
        if turn.again and op.random:
            before = _state(op.device)
            _set_state(op.device, self.states[turn.op])
            out = self._execute(op, values)
            _set_state(op.device, before)
        elif turn.again and turn.op in self.heads:
            out = with_first_rows(op.func, self._fill(op.args, values), self.heads.pop(turn.op))
        else:
            out = self._execute(op, values)
        values.update(aside)
        if op.makes:
            leaves = tree_leaves(out)
            for leaf, slot in op.makes:
                values[slot] = leaves[leaf]
                if slot in self.program.viewed and not self.program.graph.layouts[slot].fits(leaves[leaf]):
                    self.odd.add(slot)
                    if not self.is_turned:
                        self.program.strange.add(slot)
        del out
        for slot in turn.frees:
            values.pop(slot, None)

    def _execute(self, op: Instruction, values: Values) -> Any:
        return op.func(*self._fill(op.args, values), **self._fill(op.kwargs, values))

    def _fill(self, value: Any, values: Values) -> Any:
        if isinstance(value, Ref):
            return self._look(value, values)
        if type(value) in (list, tuple):
            return type(value)([self._fill(v, values) for v in value])
        if type(value) is dict:
            return {k: self._fill(v, values) for k, v in value.items()}
        return value

    def _look(self, ref: Ref, values: Values) -> torch.Tensor:
        tensor = values[ref.slot]
        if ref.size is None:
            return tensor
        if ref.slot in self.odd:
            return self._view_of(ref, values)
        return tensor.as_strided(ref.size, ref.stride, ref.offset + self.shifts.get(ref.slot, 0))


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        outputs = call.forward()
        ctx.call = call
        graph = call.program.graph
        refs = [i for i, o in enumerate(graph.outputs) if isinstance(o, Ref)]
        ctx.wanted = [refs.index(i) for i in graph.wanted]
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in outputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o in outputs if not o.is_floating_point()])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call, ctx.call = ctx.call, None
        if call is None:
            raise Unsupported(
                "a second backward through a block that runs op by op",
                hint='call backward once per forward, or recompute whole blocks: fit(..., planner="chen")',
            )
        if any(g is not None and i not in ctx.wanted for i, g in enumerate(grads)):
            raise Unsupported(
                "a block's output received a gradient that it did not receive in the traced step",
                hint="pass the loop's loss: fit(..., loss=lambda model, batch: ...)",
            )
        given = [grads[i] if grads[i] is not None else _zeros(*ctx.shapes[i]) for i in ctx.wanted]
        return None, *call.backward(given)


def _zeros(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
