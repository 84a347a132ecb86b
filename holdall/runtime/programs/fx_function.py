"""One half of a block's program as an fx function: ops in order, each result freed at its last use.

The function takes a list of tensors and empties it, so that tensors without another owner are freed in time. Parameters are
arguments at every call, never constants. It returns whole storages only, each once and no argument; the caller makes the views
that the captured block makes, so no new aliasing appears.

For a compiler, views are made by the model's own view ops, which compilers understand. Run without a compiler, a half launches
the same kernels as the single ops, with the same bits, and with less work for the launching thread.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdall.errors import Unsupported
from holdall.runtime.programs.capture import Graph, Instruction, Ref, Slot

Values = dict[Slot, torch.Tensor]
Look = Callable[[Ref, Values], torch.Tensor]


class Runnable(Protocol):
    """Runs a half. Empties the list that it is given."""

    is_broken: bool

    @property
    def is_new(self) -> bool: ...

    def attempt(self, boxed: list[torch.Tensor], /) -> list[torch.Tensor] | None: ...

    def __call__(self, boxed: list[torch.Tensor], /) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A function, with the storages of its arguments and results in one program."""

    function: Runnable
    takes: tuple[Ref, ...]
    gives: tuple[Slot, ...]
    lets_go: tuple[Slot, ...]  # storages not needed afterwards

    def run(self, values: Values, look: Look) -> bool:
        """Run all ops of the half on these storages. False: it cannot, and `values` is unchanged."""
        found: Sequence[torch.Tensor] | None = None
        if self.function.is_new:
            found = self.function.attempt([look(ref, values) for ref in self.takes])
        if self.function.is_broken:
            return False
        boxed = [] if found is not None else [look(ref, values) for ref in self.takes]
        for slot in self.lets_go:
            values.pop(slot, None)
        values.update(zip(self.gives, self.function(boxed) if found is None else found, strict=True))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    forward: Half
    backward: Half


Orders = tuple[Sequence[int], Sequence[int]]  # op numbers of the forward and of the backward


def wanted_of(graph: Graph, saved: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
    """Storages needed after the forward, and after the backward."""
    outputs = [r.slot for r in graph.outputs if isinstance(r, Ref)]
    return [*outputs, *saved], [g.slot for g in graph.gradients if g is not None]


def written(graph: Graph, order: Sequence[int], wanted: Sequence[Slot], writer: Writer, run: Callable[..., Runnable]) -> Half:
    """Write a half; `run` turns (module, arguments, results) into a function."""
    for n in order:
        writer.write(graph.ops[n])
    gives = tuple(s for s in dict.fromkeys(wanted) if s in writer.made)
    module = writer.finish(gives)
    return Half(
        function=run(module, writer.takes, gives),
        takes=tuple(writer.takes),
        gives=gives,
        lets_go=tuple({r.slot for r in writer.takes} - set(wanted)),
    )


def plain_halves(graph: Graph, orders: Orders, saved: Sequence[Slot]) -> Halves | None:
    """Both halves without a compiler; None: an op needs more than its arguments, such as a generator's state."""
    if any(op.random or op.mutates for op in graph.ops):
        return None
    try:
        both = [
            written(graph, order, wanted, Writer(graph, plain=True), _Plain)
            for order, wanted in zip(orders, wanted_of(graph, saved), strict=True)
        ]
    except Unsupported:
        return None
    return Halves(forward=both[0], backward=both[1])


class _Plain:
    """The code that fx generates, called without its module."""

    is_broken = False
    is_new = False

    def __init__(self, module: torch.fx.GraphModule, *_: object) -> None:
        self._run = module.forward

    def attempt(self, _: list[torch.Tensor]) -> list[torch.Tensor] | None:
        raise AssertionError("a plain half needs no first attempt")

    def __call__(self, boxed: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = self._run(boxed)
        return found


def obstacle(graph: Graph) -> str:
    """The kind of block that cannot be compiled, as a phrase; empty: it can."""
    if any(op.random for op in graph.ops):
        return "with random ops (dropout)"
    if any(slot not in graph.made for op in graph.ops for slot in op.mutates):
        return "that change buffers"
    return ""


class Writer:
    """Writes instructions into an fx graph. A storage is the node that made it, or an argument.

    `plain`: for running without a compiler; arguments are popped from the list one by one, and views are made by strides.
    """

    def __init__(self, graph: Graph, *, plain: bool = False) -> None:
        self.takes: list[Ref] = []
        self.made: set[Slot] = set()
        self._source = graph
        self._plain = plain
        self._out = torch.fx.Graph()
        self._boxed = self._out.placeholder("boxed")
        self._boxed.meta["steal_arg"] = True  # the function empties the list
        self._at: dict[Ref, torch.fx.Node] = {}

    def write(self, op: Instruction) -> None:
        for slot in op.mutates:
            if slot not in self.made:  # kept from the forward: the op changes a copy, which compilers optimise away
                self._make(slot, self._call(torch.ops.aten.clone.default, (self._node(Ref(slot)),)))
        result = self._call(op.func, self._fill(op.args), self._fill(op.kwargs))
        for leaf, slot in op.makes:
            self._make(slot, result if _is_one(op.func) else self._call(operator.getitem, (result, leaf)))

    def finish(self, gives: Sequence[Slot]) -> torch.fx.GraphModule:
        self._out.output(tuple(self._at[Ref(slot)] for slot in gives))
        return torch.fx.GraphModule({}, self._out)

    def _call(self, func: Any, args: Any, kwargs: Any = None) -> torch.fx.Node:
        return self._out.call_function(func, args, kwargs or {})

    def _make(self, slot: Slot, node: torch.fx.Node) -> None:
        for ref in [r for r in self._at if r.slot == slot]:
            del self._at[ref]  # views of the old value
        self._at[Ref(slot)] = node
        self.made.add(slot)

    def _fill(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._node(value)
        if type(value) in (list, tuple):
            return type(value)([self._fill(v) for v in value])
        if type(value) is dict:
            return {k: self._fill(v) for k, v in value.items()}
        return value

    def _node(self, ref: Ref) -> torch.fx.Node:
        if ref not in self._at:
            self._at[ref] = self._look(ref)
        return self._at[ref]

    def _look(self, ref: Ref) -> torch.fx.Node:
        view = self._source.views.get(ref) if ref.size is not None and not self._plain else None
        func = None if view is None else _as_view(view.func)
        if view is not None and func is not None:
            found = self._call(func, self._fill(view.args), self._fill(view.kwargs))
            return found if view.leaf is None else self._call(operator.getitem, (found, view.leaf))
        if ref.slot in self.made:
            strides = (self._node(Ref(ref.slot)), list(ref.size or ()), list(ref.stride), ref.offset)
            if self._plain:
                return self._out.call_method("as_strided", strides)
            return self._call(torch.ops.aten.as_strided.default, strides)
        self.takes.append(ref)  # the caller makes the view, and knows the storage offset
        if self._plain:
            return self._out.call_method("pop", (self._boxed, 0))  # they are taken in this order
        return self._call(operator.getitem, (self._boxed, len(self.takes) - 1))


def _as_view(func: Any) -> Any:
    """The op, if compilers treat its result as a view and need no storage offset; otherwise None."""
    if func is torch.ops.aten._unsafe_view.default:
        return torch.ops.aten.view.default  # a change through one view must show in the other
    is_known = any(r.alias_info is not None for r in func._schema.returns)
    return func if is_known and func is not torch.ops.aten.as_strided.default else None


def _is_one(func: Any) -> bool:
    """Does the op return a single tensor?"""
    returns = func._schema.returns
    if len(returns) > 1 and any("[]" in str(r.type) for r in returns):
        raise Unsupported(f"`{func}` returns a list besides tensors: such blocks run op by op")
    return len(returns) == 1 and str(returns[0].type) == "Tensor"
