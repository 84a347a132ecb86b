"""Records a step op by op, on fake or real tensors.

Memory is counted by storage: a view costs nothing, and a storage lives until its last reference dies. Two kinds of reference
matter to a planner and are told apart here. *Locals* (Python frames, temporaries) end by themselves; *saves* are autograd's,
and an action can end them early. To separate them, autograd saves a description instead of the tensor, and unpacking makes a
stand-in: the storage then dies when the locals release it, and that moment is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from holdall.attributes import Attributes
from holdall.ops import backward_nodes, count_flops, is_random, mutated_arguments, odd_argument, tensors_in
from holdall.tracing.autocast import autocast_now
from holdall.tracing.calls import Call, Given
from holdall.tracing.mixing import MixedDtypes, mixed_dtypes
from holdall.tracing.timing.op_timing import Trials, is_bound
from holdall.tracing.values.effects import CONSTANT, effects_of
from holdall.tracing.values.known import KnownValues
from holdall.tracing.values.originals import Originals
from holdall.types import Kind, Op, Phase, Save, Site, TensorInfo
from holdall.types.layout import round_up

_SCALAR = 8  # bytes of a loss


@dataclass(slots=True)
class TensorRecord:
    """A storage while it is being recorded."""

    id: int
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    born: int
    freed: int | None = None
    saved: bool = False


@dataclass(slots=True)
class _Save:
    tensor: int
    packed: int
    unpacked: int | None = None
    released: int | None = None


class _Packed:
    """Stands for a saved tensor in autograd's graph."""

    __slots__ = ("__weakref__", "index", "kept", "like", "payload")

    def __init__(self, index: int, kept: torch.Tensor | None, like: Any, payload: torch.UntypedStorage | None) -> None:
        self.index = index
        self.kept = kept
        self.like = like
        self.payload = payload


class Recorder(TorchDispatchMode):
    """The dispatch mode under which one step runs. `finish` returns the recording."""

    supports_higher_order_operators = True

    def __init__(self, *, values: KnownValues, real: bool, trials: Trials, device: str = "cpu", narrow: bool = False) -> None:
        super().__init__()
        self._is_narrow = narrow  # weights are working copies: an op may get float32 besides
        self.device = device  # the kind of device that ops run on
        self.autocast: torch.dtype | None = None  # active when the first module was called
        self.values = values
        self.trials = trials
        self.real = real  # real tensors: saved bytes must be kept in a copy
        self.phase = Phase.FORWARD
        self.ops: list[Op] = []
        self.tensors: list[TensorRecord] = []
        self.saves: list[_Save] = []
        self.calls: list[Call] = []
        self._stack: list[Call] = []
        self._ids: dict[int, int] = {}  # storage id -> tensor
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._stand_ins: dict[int, tuple[int, int]] = {}  # storage id -> (tensor, save)
        self._nth: dict[tuple[Phase, str, str], int] = {}
        self._module_of_seq: dict[int, str] = {}
        self._seq = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._module_of_param: dict[int, str] = {}
        self._last = ""  # module of the last autograd node that ran
        self._quiet = 0
        self._new_loss = -1  # the moment when the forward returned its loss
        self._is_over = False
        self._with_loss: list[int] = []  # tensors freed with the loss, after the step
        self.asked: set[str] = set()  # calls whose forward read a value: control flow may depend on it
        self.originals = Originals()
        self._constants: dict[int, int] = {}  # tensors first seen as an argument -> the op that used them

    # moments

    @property
    def now(self) -> int:
        """Index of the last finished op; -1 before the first."""
        return len(self.ops) - 1

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Ops inside belong to the recorder and are not recorded."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # tensors

    def seed(self, named: Iterable[tuple[str, torch.Tensor]], kind: Kind) -> None:
        """Register tensors that exist before the step."""
        for name, tensor in named:
            self._see(tensor, name, kind, born=-1)

    def name_parameters(self, modules: dict[int, str]) -> None:
        """id of a parameter -> its module, for the ops that accumulate gradients."""
        self._module_of_param = modules

    def mark(self, tensors: Iterable[tuple[str, torch.Tensor]], kind: Kind) -> None:
        """Give tensors made during the step (gradients) their kind and name."""
        for name, tensor in tensors:
            key = tensor.untyped_storage()._cdata
            stand_in = self._stand_ins.get(key)  # a saved tensor may be a gradient: that of a head, made in forward
            found = self._ids.get(key) if stand_in is None else stand_in[0]
            if found is not None and self.tensors[found].born >= 0:
                self.tensors[found].kind = kind
                self.tensors[found].name = name

    def same(self, stand_in: torch.Tensor | None, tensor: torch.Tensor) -> None:
        """Count `stand_in` as `tensor` from now on."""
        if stand_in is not None:
            index = self._see(tensor, "", Kind.TEMP, born=self.now)
            self._stand_ins[stand_in.untyped_storage()._cdata] = (index, -1)

    def remember_loss(self, loss: torch.Tensor) -> None:
        """Register the previous step's loss: a loop's variable holds it until this forward returns a new one."""
        size = int(loss.untyped_storage().nbytes())
        self._new_loss = self.now
        self._from_before("the loss before", tuple(loss.shape), str(loss.dtype).removeprefix("torch."), size)

    def _from_before(self, name: str, shape: tuple[int, ...], dtype: str, size: int) -> None:
        self.tensors.append(TensorRecord(len(self.tensors), name, Kind.INPUT, shape, dtype, size, -1, self._new_loss))

    def end_step(self) -> None:
        """The step is done. Tensors freed with the loss from now on were held by its graph: a tensor that a function put on its
        `ctx` lives until the loop has another loss, so the previous step's is alive during this forward.
        """
        self._is_over = True

    def _see(self, tensor: torch.Tensor, name: str, kind: Kind, born: int) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._stand_ins:
            return self._stand_ins[key][0]
        known = self._ids.get(key)
        if known is not None:
            info = self.tensors[known]
            info.nbytes = max(info.nbytes, storage.nbytes())
            return known
        index = len(self.tensors)
        self.tensors.append(
            TensorRecord(
                id=index,
                name=name,
                kind=kind,
                shape=tuple(int(n) for n in tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                nbytes=int(storage.nbytes()),
                born=born,
            )
        )
        self._ids[key] = index

        def gone(_: object) -> None:
            self._ids.pop(key, None)
            self._watch.pop(key, None)
            if self._is_over:
                self._with_loss.append(index)
            else:
                self.tensors[index].freed = self.now

        self._watch[key] = weakref.ref(storage, gone)
        return index

    def ids(self, value: Any) -> tuple[int, ...]:
        """Tensors inside an argument or a result, each once."""
        found: dict[int, None] = {}
        for t in tensors_in(value):
            before = len(self.tensors)
            index = self._see(t, CONSTANT, Kind.BUFFER, born=-1)
            if index >= before:
                self._constants[index] = self.now + 1
            found[index] = None
        return tuple(found)

    # autograd

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Pass autograd's saves through the recorder while this is open."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        with self.quiet():
            index = self._see(tensor, CONSTANT, Kind.BUFFER, born=-1)
            info = self.tensors[index]
            info.saved = True
            save = len(self.saves)
            self.saves.append(_Save(tensor=index, packed=self.now))
            stays = info.born < 0
            like = None if stays else (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
            payload = None
            if not stays and self.real:
                payload = tensor.detach().untyped_storage().clone()
            packed = _Packed(save, tensor.detach() if stays else None, like, payload)
            if not stays:
                self.values.carry(tensor, save)

        def released(_: object) -> None:
            self._watch.pop(-1 - save, None)
            self.values.forget(save)
            self.saves[save].released = max(self.now, self.saves[save].released or -1)

        self._watch[-1 - save] = weakref.ref(packed, released)
        return packed

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        save = self.saves[packed.index]
        if save.unpacked is None:
            save.unpacked = self.now
        if packed.kept is not None:
            return packed.kept
        with self.quiet():
            shape, stride, offset, dtype, device = packed.like
            if packed.payload is None:
                # same strides from offset 0: a stand-in is never counted, so its size does not matter
                stand_in = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            else:
                stand_in = torch.empty(0, dtype=dtype, device=device).set_(packed.payload, offset, shape, stride)
            self.values.restore(packed.index, stand_in)
            storage = stand_in.untyped_storage()
            key = storage._cdata
            self._stand_ins[key] = (save.tensor, packed.index)

            def gone(_: object) -> None:
                # a stand-in that becomes part of a gradient keeps the tensor alive
                self._stand_ins.pop(key, None)
                self._watch.pop(key, None)
                save.released = max(self.now, save.released or -1)

            self._watch[key] = weakref.ref(storage, gone)
        return stand_in

    # modules

    def enter(self, path: str, module: torch.nn.Module, args: Any) -> None:
        if not self.calls:
            self.autocast = autocast_now(self.device)
        self._attribute_nodes()
        nth = self._nth.setdefault((Phase.FORWARD, path, "<call>"), 0)
        self._nth[(Phase.FORWARD, path, "<call>")] = nth + 1
        call = Call(
            path=path,
            nth=nth,
            kind=type(module).__name__,
            composite=next(module.children(), None) is not None,
            transparent=isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)),
            depth=len(self._stack),
            first=self.now + 1,
            first_save=len(self.saves),
            inputs=self.ids(args),
            odd=odd_argument(args),
            quiet=not torch.is_grad_enabled(),
            shapes=tuple(tuple(int(n) for n in t.shape) for t in tensors_in(args)),
        )
        if not call.odd:
            call.given = Given.of(args)
        call.before = Attributes(module)
        (self._stack[-1].children if self._stack else self.calls).append(call)
        self._stack.append(call)

    def leave(self, output: Any) -> None:
        self._attribute_nodes()
        call = self._stack.pop()
        call.last, call.last_save = self.now, len(self.saves)
        call.outputs = self.ids(output)
        if call.before is not None:
            call.effects, call.before = effects_of(call.before, self._ids, self.ops[call.first :]), None

        def begins(_: object) -> None:
            if call.backward is None:
                call.backward = self.now

        for node in backward_nodes(output):
            node.register_prehook(begins)
        for number, t in enumerate(tree_iter(output)):
            if isinstance(t, torch.Tensor):
                call.leaves[number] = self._see(t, CONSTANT, Kind.BUFFER, born=-1)
                _tell_gradient(t, number, call.wanted)

    def _attribute_nodes(self) -> None:
        """Assign the autograd nodes made since the last call to the running module."""
        seq = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self.phase is Phase.FORWARD:
            path = self._stack[-1].path if self._stack else ""
            for n in range(self._seq, seq):
                self._module_of_seq[n] = path
        self._seq = seq

    def _module(self) -> str:
        if self.phase is Phase.FORWARD:
            return self._stack[-1].path if self._stack else ""
        node = torch._C._current_autograd_node()
        if node is None:  # autograd sums the gradients of the previous node and of an earlier one
            return self._last
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._module_of_param.get(id(variable), "")
        self._last = self._module_of_seq.get(node._sequence_nr(), "")
        return self._last

    # ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return self.values.run(func, args, kwargs)
        with self.quiet():
            if self.phase is Phase.FORWARD:
                self._attribute_nodes()
                if func is torch.ops.aten._local_scalar_dense.default and not self.values.is_constant(args[0]):
                    self.asked.update(call.name for call in self._stack)
                if self._is_narrow and (dtypes := mixed_dtypes(func, args)):
                    call = self._stack[-1] if self._stack else None
                    raise MixedDtypes(str(func), call.kind if call else "the loss", call.path if call else "", dtypes)
            reads = self.ids((args, kwargs))
            mutates = self.ids(changing := mutated_arguments(func, args, kwargs))
            self.originals.keep(changing, self._ids, self.tensors)
        out = self.values.run(func, args, kwargs)
        with self.quiet():
            self._record(func, args, kwargs, out, reads, mutates)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, reads: tuple[int, ...], mutates: tuple[int, ...]) -> None:
        outs = tensors_in(out)
        before = len(self.tensors)
        here = len(self.ops)
        module = self._module()
        name = str(func)
        label = f"{module}.{name.split('.')[1]}" if "." in name and module else name
        made = tuple(dict.fromkeys(i for i in (self._see(t, label, Kind.TEMP, born=here) for t in outs) if i >= before))
        if not made and not mutates:
            return  # a view costs nothing and owns nothing
        key = (self.phase, module, name)
        nth = self._nth.get(key, 0)
        self._nth[key] = nth + 1
        tensors = tensors_in((args, kwargs)) + outs
        floats = [t.dtype for t in tensors if t.is_floating_point() and t.numel() > 1]
        dtype = max(floats, key=floats.count, default=torch.int64)
        trial = self.trials.ask(func, args, kwargs)
        self.ops.append(
            Op(
                id=here,
                site=Site(phase=self.phase, module=module, op=name, nth=nth),
                reads=tuple(i for i in reads if i not in made),
                writes=made,
                mutates=mutates,
                flops=count_flops(func, args, kwargs, out),
                moved=sum(t.numel() * t.element_size() for t in tensors),
                seconds=trial.seconds,
                workspace=trial.workspace,
                random=is_random(func, args, kwargs),
                dtype=str(dtype).removeprefix("torch."),
                accumulates=self._accumulates(),
            )
        )

    def _accumulates(self) -> bool:
        node = torch._C._current_autograd_node() if self.phase is Phase.BACKWARD else None
        return getattr(node, "variable", None) is not None

    # result

    def _place_constants(self) -> None:
        """Assign constants that died during the step (`torch.tensor(1.0)`) to the op that first used them."""
        for index, op in self._constants.items():
            info = self.tensors[index]
            if info.freed is not None and op < len(self.ops):
                info.born, info.kind = op, Kind.TEMP
                self.ops[op] = _made_here(self.ops[op], index)

    def close(self) -> None:
        """The step is over and its loss freed: tensors that die from now on outlived it."""
        self._watch.clear()
        gone, self._with_loss = self._with_loss, []
        for t in (self.tensors[i] for i in gone):
            if t.kind is Kind.TEMP and 0 <= t.born <= self._new_loss and t.nbytes > _SCALAR:
                self._from_before(f"{t.name} of the step before", t.shape, t.dtype, t.nbytes)

    def finish(self, *, align: int = 1) -> tuple[tuple[Op, ...], dict[int, TensorInfo], tuple[Save, ...]]:
        """The recording; sizes are rounded up to `align`, as by the device's allocator."""
        self.close()
        self._place_constants()
        tensors = {}
        for t in self.tensors:
            kind = t.kind
            if kind is Kind.TEMP and t.saved:
                kind = Kind.ACTIVATION
            tensors[t.id] = TensorInfo(
                id=t.id,
                name=t.name,
                kind=kind,
                shape=t.shape,
                dtype=t.dtype,
                nbytes=round_up(t.nbytes, align),
                born=t.born,
                freed=t.freed,
                saved=t.saved,
            )
        saves = tuple(Save(tensor=s.tensor, packed=s.packed, unpacked=s.unpacked, released=s.released) for s in self.saves)
        return self._ops_in_a_step(), tensors, saves

    def _ops_in_a_step(self) -> tuple[Op, ...]:
        """The ops, with their times inside a whole step."""
        slower = self.trials.slowdown()
        if slower == 1.0:
            return tuple(self.ops)
        return tuple(replace(op, seconds=op.seconds * slower) if is_bound(op.site.op) else op for op in self.ops)


def _tell_gradient(output: torch.Tensor, number: int, wanted: set[int]) -> None:
    """Add the index to `wanted` when this output receives a gradient."""
    with torch._C.DisableTorchFunctionSubclass():  # lazy logits would be computed
        ends = [(t.grad_fn, t.output_nr) for t in (output, output._base) if t is not None and t.grad_fn is not None]
    for node, place in ends:

        def arrives(grads: Any, at: int = place) -> None:
            if grads[at] is not None:
                wanted.add(number)

        node.register_prehook(arrives)


def _made_here(op: Op, tensor: int) -> Op:
    return replace(op, reads=tuple(x for x in op.reads if x != tensor), writes=(*op.writes, tensor))
