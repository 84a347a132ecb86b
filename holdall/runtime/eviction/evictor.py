"""Runs a step under an eviction policy: a dispatch mode below autograd handles every op.

From the model's forward on, the results of ops are returned as `Handle`s; parameters, buffers, the batch and `p.grad` stay
ordinary tensors. Before an op runs, its evicted inputs are recomputed and room is made for its results, whose sizes `outlook`
predicts, so live bytes stay within the budget. The pool decides, and its clock counts costs instead of seconds, so a run takes
the decisions that the simulation predicted.

The mode is entered once, below the ledger, and handles only ops of a forward, of a backward, or on handles.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdall.runtime.arena.directed import DirectedArena
from holdall.runtime.eviction.arguments import Spec, flatten, map_tensors, unflatten
from holdall.runtime.eviction.handle import Cell, Handle, geometry, over
from holdall.runtime.eviction.outlook import Nature, Outlook, changed_arguments, nature_of
from holdall.runtime.eviction.pool import Counts, EvictionPool, wants
from holdall.runtime.eviction.recipe import Constant, OpRecipe, RandomState, Spot, new_storages, version_of
from holdall.runtime.eviction.recording import UseRecord
from holdall.runtime.eviction.room import leave_room
from holdall.runtime.eviction.storages import Maker, Storage
from holdall.tiers import Store

_aten = torch.ops.aten
MakePool = Callable[["Evictor", int], EvictionPool]  # (driver, bytes in use at the start of a step) -> pool
_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, Handle)
See = Callable[[torch.UntypedStorage, str], None]


@dataclass(slots=True)
class _OpCall:
    """One op as it is dispatched: its arguments, whole and flattened, and the handles among them."""

    func: Any
    nature: Nature
    args: Any
    kwargs: Any
    flat: list[Any]
    spec: Spec
    handles: list[Handle]
    backward: bool
    accumulates: bool  # its result becomes a gradient of a parameter


class Evictor(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(
        self,
        make_pool: MakePool,
        outlook: Outlook,
        *,
        live: Callable[[], int],
        see: See,
        tick: Callable[[], None],
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
        waits: bool = True,
        memory: DirectedArena | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__()
        self.memory = memory  # where results lie as the policy's arena says; None: the device's allocator places them
        self._make_pool = make_pool
        self._outlook = outlook
        self._live = live
        self._see = see
        self._tick = tick  # called after each op
        self._quiet = quiet  # a context whose ops are not counted against the budget
        self._store = store  # of swapped storages
        self._record: UseRecord | None = None  # of the first step
        self._waits = waits  # a step ends with the optimizer's; otherwise with the forward after a backward
        self._depth = 0  # nesting depth of forwards
        self._is_over = True  # the previous step has been settled
        self._went_back = False  # a backward has run in this step
        self._cells: weakref.WeakSet[Cell] = weakref.WeakSet()
        self._handed: dict[int, tuple[weakref.ref[Any], Storage]] = {}  # gradients that parameters own now
        self.pool = make_pool(self, 0)
        self.ops = 0
        self.seconds = 0.0  # overhead, without the ops themselves
        self.past: list[Counts] = []  # of earlier steps

    # steps

    def begin_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._depth += 1
        if self._depth == 1 and self._went_back and not self._waits:
            self.settle()
        if self._depth == 1 and self._is_over:
            self.pool = self._make_pool(self, self._live())
            if self.memory is not None:
                memory = self.memory
                self.pool.room.address_of = lambda s: memory.offset_of(s.bytes)
            self.pool.swaps.recall(self._record)
            self._is_over = self._went_back = False

    def end_forward(self) -> None:
        self._depth = max(0, self._depth - 1)

    def settle(self) -> None:
        """End the step before parameters change: storages still referenced are kept for good."""
        if self._is_over:
            return
        with torch._C._DisableTorchDispatch():
            for cell in list(self._cells):
                if cell.pool is self.pool and cell.value.maker is not None:
                    self.pool.fix(cell.value)
            for _, value in list(self._handed.values()):
                if value.maker is not None:
                    self.pool.fix(value)  # so that nothing is kept to recompute gradients
        for cell in list(self._cells):
            cell.value.place = None  # the arena ends with the step
        self._is_over = True
        self.pool.swaps.end()
        self._record = self.pool.swaps.recorded()
        self.past.append(self.pool.counts)

    def close(self) -> None:
        """Leave the program's handles usable, without a budget; evicted ones are recomputed on access."""
        self._depth = 0
        self.pool.budget, self.pool.patience = 2**62, math.inf
        for cell in list(self._cells):
            if cell.pool is self.pool and cell.value.maker is not None and cell.value.is_there:
                self.pool.fix(cell.value)
        self.pool.swaps.close(self.pool)
        if not self._is_over:
            self._is_over = True
            self.past.append(self.pool.counts)

    # ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._depth and not any(issubclass(t, Handle) for t in types):
            node = torch._C._current_autograd_node()
            if node is None or self._is_over:
                if not self._is_over:
                    leave_room(self.pool)
                return func(*args, **kwargs)
        return self.dispatch(func, args, kwargs)

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        began = time.perf_counter()
        node = torch._C._current_autograd_node()
        self._went_back = self._went_back or node is not None
        accumulates = node is not None and node.name().endswith("AccumulateGrad")
        nature = nature_of(func)
        flat, spec = flatten(args, kwargs)
        handles = [x for x in flat if isinstance(x, Handle)]
        foreign = any(isinstance(x, torch.Tensor) and type(x) not in _ORDINARY for x in flat)
        with nullcontext() if foreign else torch._C._DisableTorchDispatch():  # hide the work here from other modes
            if nature.is_view:
                out = self._view(func, flat, spec, handles, accumulates)
            elif nature.only_looks:
                real_args, real_kwargs = unflatten([self.plain(x) if isinstance(x, Handle) else x for x in flat], spec)
                out = func(*real_args, **real_kwargs)
            else:
                backward = node is not None or (not self._depth and func is _aten.ones_like.default)
                out = self._op(_OpCall(func, nature, args, kwargs, flat, spec, handles, backward, accumulates))
                self.ops += 1
        self.seconds += time.perf_counter() - began
        return out

    def _view(self, func: Any, flat: list[Any], spec: Spec, handles: list[Handle], accumulates: bool) -> Any:
        """A view of the same storage, which may be evicted. A gradient that a parameter takes over becomes an
        ordinary tensor."""
        if not handles:
            args, kwargs = unflatten(flat, spec)
            return func(*args, **kwargs)
        source = handles[0]
        if accumulates:
            return self._hand_over(source)
        ghosts = [_ghost(x) if isinstance(x, Handle) else x for x in flat]
        args, kwargs = unflatten(ghosts, spec)
        out = func(*args, **kwargs)
        return map_tensors(out, lambda t: Handle(t, t.storage_offset(), source.cell, self, source.device))

    def _op(self, call: _OpCall) -> Any:
        """Run an op: make room, run it on the real tensors, and record how its results can be made again."""
        pool, label = self.pool, str(call.func)
        changed, outside = self._changed_by(call)
        cells = list({id(h.cell): h.cell for h in call.handles}.values())
        inputs = tuple(cell.value for cell in cells)
        at = {id(cell): n for n, cell in enumerate(cells)}
        key = self._outlook.key(call.func, call.flat, len(call.args))
        sizes = self._outlook.sizes(key, call.func, call.args, call.kwargs)
        pool.prepare(inputs, sizes or (), label)
        for cell in changed:
            pool.swaps.discard(pool, cell.value)
        pool.swaps.look_ahead(pool, sizes or ())
        try:
            out, real, random = self._execute(call, is_known=sizes is not None)
        except BaseException:
            pool.failed(inputs)
            raise
        given = {t.untyped_storage()._cdata for t in real if isinstance(t, torch.Tensor)}
        fresh = new_storages(out, given)
        got = tuple(self._outlook.rounded(s.nbytes()) for s in fresh)
        if got != sizes:
            self._outlook.learn(key, got)
            if sum(got) > sum(sizes or ()):
                pool.make_room(got, label)
        cost = self._outlook.cost(key, call.func, call.args, call.kwargs, out)
        maker = Maker(inputs=inputs, cost=cost, label=label, scratch=sum(t.nbytes for t in outside.values()))
        made = [] if call.accumulates else [_stored(label, size, maker, s) for s, size in zip(fresh, got, strict=True)]
        changes = _replace(changed, label, maker)
        forms: list[Any] = []
        if made or changes:
            forms = [self._form(x, at, outside) for x in call.flat]
            maker.payload = OpRecipe(call.func, forms, call.spec, random)
        for t in call.flat:
            if isinstance(t, torch.Tensor) and not isinstance(t, Handle):
                self._see(t.untyped_storage(), label)
        for storage in fresh:
            self._see(storage, label)
        self._tick()
        pool.made(maker, made, changes=changes, backward=call.backward)
        if made or changes:
            constants = [x for x in forms if isinstance(x, Constant) and not x.changed]
            pool.reads_outside(maker, [x.tensor.untyped_storage()._cdata for x in constants])
        return self._wrap(out, real, call.flat, made, call.handles)

    def _changed_by(self, call: _OpCall) -> tuple[list[Cell], dict[int, torch.Tensor]]:
        """What an op changes in place: handles' cells, and tensors outside of the pool, whose readers are told."""
        nature = call.nature
        if not nature.changed and not nature.is_batch_norm:
            return [], {}
        altered = changed_arguments(call.func, nature, call.args, call.kwargs)
        outside = {id(t): t for t in altered if not isinstance(t, Handle)}
        if outside and not nature.is_batch_norm:
            self.pool.changes_outside([t.untyped_storage()._cdata for t in outside.values()])
        return [t.cell for t in altered if isinstance(t, Handle)], outside

    def _execute(self, call: _OpCall, *, is_known: bool) -> tuple[Any, list[Any], RandomState | None]:
        """(result, real arguments, random state before a random op). `is_known`: the sizes of its results are."""
        real = [over(x.cell.value.bytes, geometry(x)) if isinstance(x, Handle) else x for x in call.flat]
        random = RandomState(self._device(real)) if call.nature.is_random else None
        args, kwargs = unflatten(real, call.spec)
        paused = time.perf_counter()
        with nullcontext() if is_known else self._quiet():
            out = self._run(lambda: call.func(*args, **kwargs))
        self.seconds -= time.perf_counter() - paused
        return out, real, random

    def _form(self, x: Any, at: dict[int, int], outside: dict[int, torch.Tensor]) -> Any:
        if isinstance(x, Handle):
            return Spot(at[id(x.cell)], geometry(x))
        if isinstance(x, torch.Tensor):
            return Constant(x, version_of(x), id(x) in outside)
        return x

    def _wrap(self, out: Any, real: list[Any], flat: list[Any], made: Sequence[Storage], handles: list[Handle]) -> Any:
        """The results as the program sees them: handles for new storages; arguments that are returned stay the same objects."""
        same = {id(r): x for r, x in zip(real, flat, strict=True) if isinstance(r, torch.Tensor)}
        cells: dict[int, Cell] = {h.cell.value.bytes._cdata: h.cell for h in handles if h.cell.value.bytes is not None}
        for s in made:
            cell = Cell(s, self.pool)
            self._cells.add(cell)
            cells[s.bytes._cdata] = cell

        def handle(t: torch.Tensor) -> torch.Tensor:
            if id(t) in same:
                return same[id(t)]  # type: ignore[no-any-return]
            found = cells.get(t.untyped_storage()._cdata)
            return t if found is None else Handle(t, t.storage_offset(), found, self, t.device)

        return map_tensors(out, handle)

    def _run(self, call: Callable[[], Any]) -> Any:
        """Run an op; on an out-of-memory error (fragmentation) evict more and try again."""
        while True:
            try:
                with nullcontext() if self.memory is None else self.memory.at(self.pool.room.expected()):
                    return call()
            except torch.OutOfMemoryError:
                if not self.pool.give_way():
                    raise

    def _device(self, real: list[Any]) -> torch.device:
        return next((t.device for t in real if isinstance(t, torch.Tensor) and t.device.type == "cuda"), torch.device("cpu"))

    # bytes

    def plain(self, handle: Handle) -> torch.Tensor:
        """An ordinary tensor over the handle's bytes."""
        value = handle.cell.value
        if not value.is_there:
            self.pool.prepare([value], ())
            self.pool.failed([value])  # unlock it: no op ran
        elif value.ready is not None:
            self.pool.swaps.read(self.pool, [value])
        return over(value.bytes, geometry(handle))

    def _hand_over(self, handle: Handle) -> torch.Tensor:
        """Turn a gradient into an ordinary tensor that its parameter owns."""
        cell = handle.cell
        given = self.plain(handle)
        storage, value, pool = cell.value.bytes, cell.value, self.pool
        pool.swaps.settle(pool, value)
        key = storage._cdata
        cell.pool = None
        value.bytes = None
        value.fresh = True
        pool.candidates.pop(value, None)

        def gone(_: object) -> None:
            self._handed.pop(key, None)
            pool.release(value)

        self._handed[key] = (weakref.ref(storage, gone), value)
        return given

    # what the pool asks

    def rerun(self, maker: Maker, consumes: bool) -> None:
        instead = {}
        if not consumes:
            for old, _ in maker.changes:
                instead[maker.inputs.index(old)] = old.bytes.clone()
                self._see(instead[maker.inputs.index(old)], maker.label)
        fresh = self._run(lambda: maker.payload.run(maker.inputs, instead))
        for s, storage in zip(maker.outputs, fresh, strict=True):
            self._see(storage, maker.label)
            if wants(s, maker):
                s.bytes = storage
        for old, new in maker.changes:
            if wants(new, maker):
                new.bytes = instead.get(maker.inputs.index(old), old.bytes)
                if consumes:
                    old.bytes = None

    def drop(self, storage: Storage) -> None:
        storage.bytes = None

    def send(self, storage: Storage) -> None:
        assert self._store is not None, "nothing is swapped without a store"
        with self._quiet():
            storage.ticket = self._store.put(storage.bytes)

    def sent(self, storage: Storage) -> None:
        assert self._store is not None
        self._store.wait(storage.ticket)

    def fetch(self, storage: Storage) -> None:
        store = self._store
        assert store is not None
        with self._quiet():
            storage.bytes = self._run(lambda: store.get(storage.ticket, store.device))
        self._see(storage.bytes, "fetch")

    def arrive(self, storage: Storage) -> None:
        assert self._store is not None
        self._store.wait_in(storage.ticket)

    def discard(self, storage: Storage) -> None:
        assert self._store is not None
        if storage.ticket.is_live:  # else the store was closed
            self._store.free(storage.ticket)
        storage.ticket = None


def _stored(label: str, size: int, maker: Maker, storage: torch.UntypedStorage) -> Storage:
    made = Storage(label, size, maker)
    made.bytes = storage
    return made


def _replace(changed: Sequence[Cell], label: str, maker: Maker) -> list[tuple[Storage, Storage]]:
    """(old, new) value of each cell that an op changed in place; the new one takes over the bytes."""
    found = []
    for cell in dict.fromkeys(changed):
        old = cell.value
        cell.value = _stored(label, old.size, maker, old.bytes)
        old.bytes = None
        found.append((old, cell.value))
    return found


def _ghost(handle: Handle) -> torch.Tensor:
    """The same view on the meta device."""
    size = handle.cell.value.size
    whole = torch.empty(size // handle.dtype.itemsize, dtype=handle.dtype, device="meta")
    return whole.as_strided(handle.shape, handle.stride(), handle.storage_offset())
