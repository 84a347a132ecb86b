"""Captures one block call as a list of ops, forward and backward, so that they can run in another order and more than once.

The block runs once on fake tensors under `make_fx`, with its backward by autograd: the same ops in the same order as in eager
training, nothing fused or decomposed. Views are folded into the tensor that owns the bytes, as in a trace, so op number n here
is op number n of the block there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten

from holdall.attributes import left_as_found
from holdall.errors import Unsupported
from holdall.ops import branches_of_a_real_run, called_with, is_random, mutated_arguments
from holdall.runtime.programs.answers import Answers

Slot = int  # a storage


class Ref(NamedTuple):
    """A tensor argument: a storage and a view of it. `size` None: the whole storage as it was made."""

    slot: Slot
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


class StorageLayout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> StorageLayout:
        return StorageLayout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Does the tensor have this layout? The strides of a single element do not matter."""
        pairs = zip(self.stride, tensor.stride(), tensor.shape, strict=False)
        return tensor.dim() == len(self.shape) and all(a == b or n == 1 for a, b, n in pairs)


class View(NamedTuple):
    """The op that first made a certain view of a storage, with `Ref`s to the same storage as arguments."""

    func: Any
    args: Any
    kwargs: Any
    leaf: int | None  # index in the list that it returns; None: it returns one tensor


@dataclass(slots=True)
class Instruction:
    """One op that makes or changes storages."""

    func: Any
    args: Any  # nested, with `Ref`s in place of tensors
    kwargs: Any
    makes: tuple[tuple[int, Slot], ...]  # (index of the result, storage)
    reads: tuple[Slot, ...]
    mutates: tuple[Slot, ...]
    random: bool
    device: torch.device


@dataclass(slots=True)
class Graph:
    """The ops of a block call: first the forward's, then the backward's."""

    ops: list[Instruction]
    forward: int  # number of forward ops
    inputs: list[Slot]  # tensors that it was called with, then parameters and buffers
    starts: list[int]  # storage offset of each input at capture
    tangents: list[Slot]
    outputs: list[Any]  # the results: a `Ref`, or a plain value
    spec: TreeSpec
    wanted: list[int]  # outputs that receive a gradient
    gradients: list[Ref | None]  # one per input
    constants: dict[Slot, torch.Tensor]
    made: set[Slot] = field(default_factory=set)
    layouts: dict[Slot, StorageLayout] = field(default_factory=dict)  # layout of every storage as it was made
    views: dict[Ref, View] = field(default_factory=dict)  # how the model itself made each view

    def names(self) -> list[str]:
        """The op names as a trace has them. Constants are copied here (`lift_fresh_copy`), since all calls share them."""
        return [str(op.func).replace("lift_fresh_copy", "lift_fresh") for op in self.ops]


class _Shim(torch.nn.Module):
    """Lets `functional_call` reach the original forward behind the harness's replacement."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once."""
    return [*module.named_parameters(), *module.named_buffers()]


def capture(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    loss_alone: bool = False,
    wanted: Sequence[int] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """The ops of this call; `Unsupported` if they depend on values, or if a submodule has hooks.

    `loss_alone`: only scalar outputs will receive a gradient. `wanted`: only these outputs will. `state`: tensors to use
    instead of the module's parameters and buffers.
    """
    for path, inner in module.named_modules():
        if inner is not module and (inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks):
            raise Unsupported(
                f"`{path}` has hooks, which a captured block would not run",
                hint='remove them, or call fit(..., planner="chen")',
            )
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    named = [(name, t if state is None else state[name]) for name, t in tensors_of(module)]
    chosen = wanted
    inputs = [leaves[i] for i in places] + [t for _, t in named]
    shim = _Shim(module, forward)
    found: dict[str, Any] = {}

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        given = dict(zip(places, tensors, strict=False))
        flat = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        swapped = {f"module.{name}": t for (name, _), t in zip(named, tensors[len(places) :], strict=True)}
        a, k = tree_unflatten(flat, spec)
        return called_with(shim, swapped, a, k)

    def joint(tensors: list[torch.Tensor]) -> Any:
        with branches_of_a_real_run(), Answers():
            out, out_spec = tree_flatten(run(tensors))
        wanted = [i for i, o in enumerate(out) if isinstance(o, torch.Tensor) and o.requires_grad]
        wanted = [i for i in wanted if (i in chosen if chosen is not None else out[i].numel() == 1 or not loss_alone)]
        trained = [i for i, t in enumerate(tensors) if t.requires_grad]
        if not wanted or not trained:
            raise Unsupported("the block has no backward", hint="a block without trained parameters or inputs is kept")
        with torch.no_grad():
            tangents = [torch.ones_like(out[i]) for i in wanted]
        with without_autocast():  # loops leave autocast before they call backward
            grads = torch.autograd.grad([out[i] for i in wanted], [tensors[i] for i in trained], tangents, allow_unused=True)
        per_input: list[Any] = [None] * len(tensors)
        for i, g in zip(trained, grads, strict=True):
            per_input[i] = g
        found.update(spec=out_spec, wanted=wanted, plain=[None if isinstance(o, torch.Tensor) else o for o in out])
        return [o if isinstance(o, torch.Tensor) else None for o in out], tangents, per_input

    with left_as_found(module):
        return _Builder(_trace(joint, inputs), inputs, found).build()


def _trace(joint: Callable[..., Any], inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with (
            same_random_numbers(),
            _disable_current_modes(),
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
            _no_autocast_cache(),
        ):
            copies = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
            drawn = random.getstate()
            made = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(copies)
            if random.getstate() != drawn:
                random.setstate(drawn)
                raise Unsupported(
                    "the block draws from Python's random numbers", hint='recompute whole blocks: fit(..., planner="chen")'
                )
            return made
    except Unsupported:
        raise
    except Exception as error:  # a model may do anything that a graph cannot express
        line = str(error).strip().split("\n")[0][:200]
        raise Unsupported(
            f"the block cannot be captured ({type(error).__name__}: {line})",
            hint='recompute whole blocks: fit(..., planner="chen")',
        ) from error


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the random generators afterwards."""
    states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if states[1]:
            torch.cuda.set_rng_state_all(states[1])


class _no_autocast_cache:  # noqa: N801
    """Keep autocast from caching casts that are fake tensors."""

    def __enter__(self) -> None:
        self._was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._was)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off for captured ops, which include the casts."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class _Builder:
    """Turns the fx graph into instructions on storages."""

    def __init__(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor], found: dict[str, Any]) -> None:
        self.gm = gm
        self.real = inputs
        self.found = found
        self.slots: dict[Any, Slot] = {}  # id of a fake storage -> slot; of inputs' also with a dtype: a unit may mix them
        self.bases: dict[Slot, torch.Tensor] = {}  # each tensor as it was made
        self.constants: dict[Slot, torch.Tensor] = {}
        self.views: dict[Ref, View | None] = {}  # None: an input or a result, not a view
        self.alive: list[Any] = []  # fake tensors, kept so that no id is reused

    def build(self) -> Graph:
        ops: list[Instruction] = []
        inputs: list[Slot] = []
        starts: list[int] = []
        result: Any = None
        for node in self.gm.graph.nodes:
            value = node.meta.get("val")
            self.alive.append(value)
            if node.op == "placeholder":
                inputs.append(self._slot(value, is_input=True))
                self.views[self._ref_to(value)] = None
                starts.append(int(value.storage_offset()))
            elif node.op == "get_attr":
                real = getattr(self.gm, node.target)
                value = node.meta.setdefault("val", real)
                self.constants[self._slot(value)] = real
            elif node.op == "output":
                result = node.args[0]
            else:
                made = self._instruction(node, value)
                if made is not None:
                    ops.append(made)
        return self._finish(ops, inputs, starts, result)

    def _finish(self, ops: list[Instruction], inputs: list[Slot], starts: list[int], result: Any) -> Graph:
        many, few = len(self.found["plain"]), len(self.found["wanted"])
        returned, stand_ins, per_input = result[:many], result[many : many + few], result[many + few :]
        tangents = [self._ref(n).slot for n in stand_ins]
        cut = next((i for i, op in enumerate(ops) if any(s in tangents for _, s in op.makes)), len(ops))
        kept = [op for op in ops if not any(s in tangents for _, s in op.makes)]
        outputs: list[Any] = []
        for value, plain in zip(returned, self.found["plain"], strict=True):
            outputs.append(plain if value is None else self._ref(value))
        own = set(inputs)
        for out in outputs:
            if isinstance(out, Ref) and out.slot in own:
                raise Unsupported(
                    "the block returns one of its inputs or a view of one",
                    hint='recompute whole blocks: fit(..., planner="chen")',
                )
        made = {s for op in kept for _, s in op.makes}
        return Graph(
            ops=kept,
            forward=cut,
            inputs=inputs,
            starts=starts,
            tangents=tangents,
            outputs=outputs,
            spec=self.found["spec"],
            wanted=self.found["wanted"],
            gradients=[None if g is None else self._ref(g) for g in per_input],
            constants=self.constants,
            made=made,
            layouts={slot: StorageLayout.of(base) for slot, base in self.bases.items()},
            views={ref: view for ref, view in self.views.items() if view is not None},
        )

    def _slot(self, tensor: torch.Tensor, *, is_input: bool = False) -> Slot:
        storage = tensor.untyped_storage()._cdata
        typed = (storage, tensor.dtype)
        key = typed if is_input or typed in self.slots else storage
        if key not in self.slots:
            self.slots[key] = len(self.bases)
            self.bases[self.slots[key]] = tensor
            self.slots.setdefault(storage, self.slots[key])
        return self.slots[key]

    def _ref(self, node: Any) -> Ref:
        """How to get a node's tensor from its storage."""
        return self._ref_to(node.meta["val"])

    def _ref_to(self, value: torch.Tensor) -> Ref:
        slot = self._slot(value)
        base = self.bases[slot]
        if value.dtype is not base.dtype:
            raise Unsupported(
                "the block views a tensor as another dtype", hint='recompute whole blocks: fit(..., planner="chen")'
            )
        mine = (tuple(value.shape), tuple(value.stride()), int(value.storage_offset()))
        if mine == (tuple(base.shape), tuple(base.stride()), int(base.storage_offset())):
            return Ref(slot)
        return Ref(slot, *mine)

    def _view(self, node: torch.fx.Node, value: Any) -> None:
        """Record how this view of a storage is made."""
        with suppress(Unsupported):  # a view as another dtype is refused where it is used
            args, kwargs = _with_refs(node.args, self._ref), _with_refs(node.kwargs, self._ref)
            given = refs_of((args, kwargs))
            self.views.update((r, None) for r in given if r not in self.views)  # no view is made from itself
            for i, leaf in enumerate(tree_iter(value)):
                if not isinstance(leaf, torch.Tensor):
                    continue
                found = self._ref_to(leaf)
                if all(r.slot == found.slot for r in given):
                    self.views.setdefault(found, View(node.target, args, kwargs, None if leaf is value else i))

    def _instruction(self, node: torch.fx.Node, value: Any) -> Instruction | None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return None  # getitem
        before = len(self.bases)
        leaves = list(tree_iter(value))
        makes: list[tuple[int, Slot]] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self._slot(leaf) >= before and all(s != self._slot(leaf) for _, s in makes):
                makes.append((i, self._slot(leaf)))
                self.views[Ref(self._slot(leaf))] = None
        real_args = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
        real_kwargs = torch.fx.map_arg(node.kwargs, lambda n: n.meta["val"])
        mutates = tuple(dict.fromkeys(self._slot(t) for t in mutated_arguments(node.target, real_args, real_kwargs)))
        if not makes and not mutates:
            self._view(node, value)
            return None
        if "rnn" in str(node.target):
            raise Unsupported(
                f"`{node.target}` keeps its workspace only under autograd",
                hint='recompute whole blocks: fit(..., planner="chen")',
            )
        args = _with_refs(node.args, self._ref)
        kwargs = _with_refs(node.kwargs, self._ref)
        reads = tuple(dict.fromkeys(r.slot for r in refs_of((args, kwargs))))
        tensors = [t for t in (*tree_iter((real_args, real_kwargs)), *leaves) if isinstance(t, torch.Tensor)]
        return Instruction(
            func=node.target,
            args=args,
            kwargs=kwargs,
            makes=tuple(makes),
            reads=reads,
            mutates=mutates,
            random=is_random(node.target, real_args, real_kwargs),
            device=next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu")),
        )


def _with_refs(value: Any, ref: Callable[[Any], Ref]) -> Any:
    if isinstance(value, torch.fx.Node):
        return ref(value)
    if isinstance(value, dict):
        return {k: _with_refs(v, ref) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        inside = [_with_refs(v, ref) for v in value]
        return inside if isinstance(value, list) else tuple(inside)
    return value


def refs_of(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, (list, tuple)):
        return [r for v in value for r in refs_of(v)]
    if isinstance(value, dict):
        return [r for v in value.values() for r in refs_of(v)]
    return []
