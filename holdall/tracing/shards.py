"""Records one step of a sharded model as one of its ranks does it, on fake tensors and with fake collectives.

The model is copied with fake parameters, and the copy is sharded by torch's own engine: so the recorded ops, collectives
included, are those of a real rank. Two things differ from other recordings. DTensors are left to take themselves apart: what is
recorded is what this rank does with its local tensors. And the engine frees and refills the storages of gathered parameters by
changing their size, so each time that one is filled it is a new tensor of the trace; autograd's references to them hold no
bytes, and are not recorded as saves.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from holdall.casts import cast_inputs
from holdall.errors import Unsupported
from holdall.ops import branches_of_a_real_run, tensors_in
from holdall.parallel.checks.sums import check_sums
from holdall.parallel.counting import collective_of, group_of
from holdall.parallel.groups import fake_mesh, group_dims, split_mesh
from holdall.parallel.parts import Division
from holdall.parallel.sharding.build import divide_update, shard_model
from holdall.parallel.ways import split_way
from holdall.sharded import (
    has_shards,
    is_shard,
    local_of,
    part_of_parameter,
    unrecorded_propagation,
    watch_engine,
    watch_resizes,
)
from holdall.tracing.blocks import find_blocks, find_shapes, find_whole
from holdall.tracing.modules import watch_modules
from holdall.tracing.recorder import Recorder
from holdall.tracing.stand_in import CudaOps
from holdall.tracing.step import How, Loss, Recorded, Step, record_optimizer, state_tensors
from holdall.tracing.timing.op_timing import Trials
from holdall.tracing.values.known import KnownValues
from holdall.types import Block, Kind, Mesh, Op, Phase
from holdall.types.info import CollectiveOp, ShardedStep
from holdall.types.layout import block_of
from holdall.updates.parts import clone_optimizer


class ShardRecorder(Recorder):
    """A recorder of one rank."""

    def __init__(self, *, values: KnownValues, trials: Trials, device: str, dim: str) -> None:
        super().__init__(values=values, real=False, trials=trials, device=device)
        self.collectives: list[CollectiveOp] = []
        self.groups: dict[str, tuple[str, int]] = {}  # as `groups.group_dims` has them, of a mesh of several dimensions
        self.by_gloo = False  # it copies what it reduces and scatters
        self.engine: set[int] = set()  # ops by which the engine gathers and reduces
        self._dim = dim
        self._is_engine = False
        self._gathered: set[int] = set()  # storages that the engine fills and frees
        self._filled: list[int] = []  # tensors that the next op makes, besides its own
        self._fillings: dict[int, list[int]] = {}  # storage -> its tensors, one for each time that it was filled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_shards(types):
            return NotImplemented
        if func.namespace in ("prim", "profiler"):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, reads: tuple[int, ...], mutates: tuple[int, ...]) -> None:
        before = len(self.ops)
        super()._record(func, args, kwargs, out, reads, mutates)
        if len(self.ops) == before:
            return
        if self._is_engine:
            self.engine.add(before)
        elif self._is_of_second_order(self.ops[-1]) and any(self._is_gathered(t) for t in tensors_in((args, kwargs))):
            raise Unsupported(
                "the loss has gradients in it, whose own backward needs weights that torch's engine has freed by then",
                hint="train on one device: leave out `mesh`, or give the penalty in a form without torch.autograd.grad",
            )
        made, self._filled = set(self._filled), []
        if made:
            op = self.ops[-1]
            self.ops[-1] = replace(
                op,
                reads=tuple(x for x in op.reads if x not in made),
                mutates=tuple(x for x in op.mutates if x not in made),
                writes=(*op.writes, *sorted(made)),
            )
        found = collective_of(func, args)
        if found is not None:
            dim = self.groups[group_of(args)][0] if self.groups else self._dim
            self.collectives.append(CollectiveOp(op=before, kind=found.kind, nbytes=found.nbytes, dim=dim))
            if self.by_gloo and found.kind == "reduce_scatter":
                self.ops[-1] = replace(self.ops[-1], workspace=found.nbytes)

    def _see(self, tensor: torch.Tensor, name: str, kind: Kind, born: int) -> int:
        return super()._see(local_of(tensor), name, kind, born)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if is_shard(tensor) or self._is_gathered(tensor):
            return tensor  # the engine frees and fills it, whoever refers to it
        return super()._pack(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else super()._unpack(packed)

    def _is_of_second_order(self, op: Op) -> bool:
        """Is it part of a backward inside of the forward that itself has a backward (`create_graph=True`)?"""
        inside = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        return op.site.phase is Phase.FORWARD and inside and torch.is_grad_enabled()

    def _is_gathered(self, tensor: torch.Tensor) -> bool:
        return local_of(tensor).untyped_storage()._cdata in self._gathered

    @contextlib.contextmanager
    def by_engine(self) -> Iterator[None]:
        """What is recorded inside is the engine's."""
        was, self._is_engine = self._is_engine, True
        try:
            yield
        finally:
            self._is_engine = was

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The engine has filled or freed the storage of a gathered parameter."""
        key, size = storage._cdata, storage.nbytes()
        if size:
            self._gathered.add(key)
        if self._quiet or key not in self._gathered:  # torch empties storages of its own, whose place others take
            return
        known = self._ids.pop(key, None)
        self._watch.pop(key, None)
        if known is not None and self.tensors[known].nbytes:
            self.tensors[known].freed = self.now
        if size:
            like = torch.empty(0, dtype=torch.uint8, device=storage.device)
            with self.quiet():
                like.set_(storage)  # type: ignore[call-overload]
                index = self._see(like, "gathered parameter", Kind.PARAM, born=self.now + 1)
            self._filled.append(index)
            self._fillings.setdefault(key, []).append(index)

    @property
    def fillings(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in self._fillings.values())


def record_sharded_step(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    loss: Loss,
    how: How,
    device: torch.device,
    mesh: Mesh,
    way: str,
    groups: tuple[str, ...],
    build: Callable[[torch.nn.Module, Any], Division] | None = None,
    data_groups: tuple[str, ...] = (),
    casts: tuple[str, ...] = (),
    chunk: Callable[[torch.nn.Module], object] = lambda _: None,
) -> tuple[Recorded, ShardedStep]:
    """Run one step of a fake copy of `model`, sharded over `mesh`; the model itself is not changed.

    `build`: divides the copy, on the parts of torch's mesh that are for that; None: it is sharded over data alone. `groups`:
    the modules concerned. `data_groups`: those with collectives of their own over data, of a model that is divided too.
    `casts`: modules that cast their inputs to `how.precision`. `chunk`: called with the copy before it is sharded, to chunk its
    head.

    A first step is run without recording: it makes the optimizer's states, and the engine prepares itself. Where the device is
    a GPU that is not here, fakes of a CPU stand in, and sizes are a GPU's.
    """
    is_elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    here = torch.device("cpu") if is_elsewhere else device
    precision = "" if how.precision is None else str(how.precision).removeprefix("torch.")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = KnownValues(mode)
    recorder = ShardRecorder(values=values, trials=Trials(here), device=here.type, dim=mesh.dims[0].name)
    recorder.by_gloo = device.type == "cpu"
    with contextlib.ExitStack() as stack:
        on = stack.enter_context(fake_mesh(mesh, here.type))
        over_data, dividing = split_mesh(on, mesh)
        if len(mesh.dims) > 1:
            recorder.groups = group_dims(on, mesh)
        stack.enter_context(branches_of_a_real_run())
        stack.enter_context(mode)
        fake = _fake_copy(model, here)
        chunk(fake)
        originals = {name: id(p) for name, p in model.named_parameters()}
        if how.precision is not None:
            cast_inputs(fake, how.precision, casts)
        if build is not None:
            build(fake, dividing).dtype = how.precision
        if over_data is not None:
            # where meshes are joined, numbers of ranks are read; parameters stay fake
            with unset_fake_temporarily() if dividing else contextlib.nullcontext():
                shard_model(fake, groups if build is None else data_groups, over_data, split_way(way)[0], precision)
        made: dict[int, torch.Tensor] = {}
        fake_batch = tree_map_only(torch.Tensor, lambda t: _input(t, here, values, made), batch)
        parameters = dict(fake.named_parameters())
        names = {id(p): name for name, p in parameters.items()}
        clone = None
        if optimizer is not None:
            swapped: dict[int, torch.Tensor] = {originals[name]: p for name, p in parameters.items()}
            clone = clone_optimizer(optimizer, swapped, foreach=False)
            divide_update(clone, fake, on, way)
        stack.callback(watch_resizes(recorder.resized))
        stack.callback(watch_engine(recorder.by_engine))
        stack.callback(unrecorded_propagation(recorder.quiet))
        stack.enter_context(recorder)
        if is_elsewhere:
            stack.enter_context(CudaOps())
        step = Step(fake, recorder, loss, how.autocast)
        with recorder.quiet():
            _prepare(
                fake,
                fake_batch,
                clone,
                loss,
                how,
                recorder,
                {name: on.get_group() for name, on in dividing.items() if name in ("tp", "cp")},
            )
            recorder.seed(parameters.items(), Kind.PARAM)
            recorder.seed(fake.named_buffers(), Kind.BUFFER)
            recorder.seed(((f"batch.{n}", t) for n, t in enumerate(made.values())), Kind.INPUT)
            if clone is not None:
                recorder.seed(state_tensors(clone, _names_of_updated(clone, names)), Kind.STATE)
        recorder.name_parameters({x: name.rpartition(".")[0] for x, name in names.items()})
        with watch_modules(fake, recorder):
            held = step(fake_batch)
        blocks = find_blocks(recorder.calls, recorder.ops, [s.packed for s in recorder.saves])
        blocks = tuple(without_gathering(block, recorder.ops, recorder.fillings) for block in blocks)
        blocks = tuple(without_copying(block, recorder.engine) for block in blocks)
        grads = ((f"{n}.grad", local_of(p.grad)) for n, p in parameters.items() if p.grad is not None)
        recorder.mark(grads, Kind.GRAD)
        if clone is not None:
            record_optimizer(recorder, clone)
        recorder.end_step()
        del held
        recorder.close()
        ops, tensors, saves = recorder.finish(align=block_of(device.type))
        blocks = tuple(block.with_engine(ops, recorder.engine) for block in blocks)
    timed = recorder.trials.is_timed
    recorder.trials.close()
    recorded = Recorded(
        ops=ops,
        tensors=tensors,
        saves=saves,
        blocks=blocks,
        units=(),
        whole=find_whole(recorder.calls),
        asked=tuple(sorted(recorder.asked)),
        called=find_shapes(recorder.calls),
        autocast=recorder.autocast,
        parts=any(call.path for call in recorder.calls),
        calls=sum(not call.path for call in recorder.calls),
        timed=timed,
        looked_at=tuple(sorted(n for n in values.looked_at if n >= 0)),
    )
    shards = ShardedStep(
        mesh=mesh,
        way=way,
        groups=groups,
        collectives=tuple(recorder.collectives),
        replicate=mesh.replicas,
        data_groups=data_groups,
        precision=precision,
        casts=casts,
        fillings=recorder.fillings,
    )
    return recorded, shards


def without_gathering(block: Block, ops: Sequence[Op], fillings: Iterable[Iterable[int]]) -> Block:
    """The block without the ops before its own in which the engine gathers its parameters: a replay does not run them."""
    filled = {x for row in fillings for x in row}
    inside = ops[block.first : block.last + 1]
    last = max((op.id for op in inside if filled & {*op.writes, *op.mutates}), default=block.first - 1)
    before = inside[: last + 1 - block.first]
    if last >= block.last or any(x in block.inputs for op in before for x in op.reads):
        return block  # it has a group inside, whose parameters are gathered later
    return replace(block, first=last + 1)


def without_copying(block: Block, engine: Collection[int]) -> Block:
    """The block without the ops after its own in which the engine copies its parameters (`hpz`): a replay does not run them."""
    return replace(block, last=max(k for k in range(block.first, block.last + 1) if k not in engine or k == block.first))


def _names_of_updated(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    """The names of what the optimizer holds: parameters, or this rank's parts of them."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    return {id(p): names[id(part_of_parameter(p))] for p in held}


def _prepare(
    fake: torch.nn.Module,
    batch: Any,
    clone: torch.optim.Optimizer | None,
    loss: Loss,
    how: How,
    recorder: Recorder,
    together: Mapping[str, Any],
) -> None:
    """`together`: groups whose ranks compute one batch, by their dimensions of the mesh."""
    casting = torch.autocast(recorder.device, dtype=how.autocast) if how.autocast is not None else contextlib.nullcontext()
    with casting:
        value = loss(fake, batch)
    for name, group in together.items():
        check_sums(value, group, name)
    value.backward()
    recorder.values.guess = True
    if clone is not None:
        clone.step()
        clone.zero_grad(set_to_none=True)
    recorder.values.guess = False
    for p in fake.parameters():
        p.grad = None


def _fake_copy(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The model with fake parameters and buffers on the device; called in a fake mode."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = torch.nn.Parameter(_like(p, device), requires_grad=p.requires_grad)
    attributes = (t for m in model.modules() for t in tree_leaves(vars(m)) if isinstance(t, torch.Tensor))
    for t in (*model.buffers(), *attributes):  # of metrics, lists of losses
        memo.setdefault(id(t), _like(t, device))
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a module may hold anything
        raise Unsupported(
            f"{type(model).__name__} cannot be copied, so its step over ranks cannot be traced ({error})",
            hint="shard it by hand with `fully_shard`, and use `holdall.apply` with a plan of the unsharded model",
        ) from error


def _like(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)


def _input(t: torch.Tensor, device: torch.device, values: KnownValues, made: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(t) not in made:
        made[id(t)] = _like(t, device).requires_grad_(t.requires_grad)
        if t.device.type != "meta":
            values.tell(made[id(t)], t, len(made) - 1)
    return made[id(t)]
