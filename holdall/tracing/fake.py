"""Records one step on fake tensors: no memory, no GPU, an unmodified model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from holdall.attributes import left_as_found
from holdall.ops import branches_of_a_real_run, called_with
from holdall.sharded import bucket_bytes
from holdall.tracing.blocks import find_blocks, find_given, find_shapes, find_whole
from holdall.tracing.modules import watch_modules
from holdall.tracing.recorder import Recorder
from holdall.tracing.stand_in import CudaOps
from holdall.tracing.step import How, Loss, Recorded, Step, materialise_state, record_narrow_update, record_optimizer
from holdall.tracing.timing.op_timing import Trials
from holdall.tracing.units import Updating, find_units, group_parameters
from holdall.tracing.values.effects import find_effects
from holdall.tracing.values.known import KnownValues, UnknownValue
from holdall.tracing.values.recurrent import RecurrentOps
from holdall.types import Kind
from holdall.types.layout import block_of
from holdall.updates.parts import clone_optimizer
from holdall.updates.stretches import made_for


def record_fake_step(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    loss: Loss,
    device: torch.device,
    how: How,
) -> Recorded:
    """Run one step of `model` on fakes of its parameters; the model itself is not changed.

    With `how.precision`, it computes with copies of the float32 parameters in this dtype; the optimizer updates the originals.
    """
    stand_in_for_cuda = device.type == "cuda" and not torch.cuda.is_available()
    on = torch.device("cpu") if stand_in_for_cuda else device
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = KnownValues(mode)
    recorder = Recorder(values=values, real=False, trials=Trials(on), device=on.type, narrow=how.precision is not None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_as_found(model))
        stack.enter_context(branches_of_a_real_run())
        stack.enter_context(made_for(device.type))
        stack.enter_context(mode)
        parameters, swapped = _fake_parameters(model, on, how.precision)
        unique = {name: parameters[name] for name, _ in model.named_parameters()}
        masters = _masters(model, unique, on) if optimizer is not None else {}
        swapped |= {id(p): masters[name] for name, p in model.named_parameters() if name in masters}
        by_id = {id(b): _fake_like(b, on) for b in model.buffers()}  # a buffer of several names is one tensor
        buffers = {name: by_id[id(b)] for name, b in model.named_buffers(remove_duplicate=False)}
        made: dict[int, torch.Tensor] = {}  # ids and labels are often one tensor, and must stay one
        bases: dict[int, torch.Tensor] = {}
        fake_batch = tree_map_only(torch.Tensor, lambda t: _fake_input(t, on, values, made, _base_of(t, device, bases)), batch)
        recorder.seed(unique.items(), Kind.PARAM)
        recorder.seed(((f"{name}.master", m) for name, m in masters.items()), Kind.STATE)
        recorder.seed(buffers.items(), Kind.BUFFER)
        recorder.seed(_named_inputs(fake_batch), Kind.INPUT)
        buckets = torch.empty(bucket_bytes(model), dtype=torch.uint8, device=on)
        recorder.seed([("gradient buckets of DistributedDataParallel", buckets)] if buckets.numel() else [], Kind.BUFFER)
        recorder.name_parameters({id(p): name.rpartition(".")[0] for name, p in unique.items()})
        recurrent = RecurrentOps(model, on) if device.type == "cuda" else None
        stack.callback(recorder.originals.put_back)
        stack.enter_context(recorder)
        clone = None
        if optimizer is not None:
            clone = clone_optimizer(optimizer, swapped, foreach=device.type == "cuda")
            stepped = {id(masters.get(name, p)): name for name, p in unique.items()}
            materialise_state(recorder, clone, stepped)
        step = Step(model, recorder, loss, how.autocast)
        swap = {f"model.{name}": t for name, t in [*parameters.items(), *buffers.items()]}
        if stand_in_for_cuda:
            stack.enter_context(CudaOps())
        if recurrent is not None:
            stack.enter_context(recurrent)
        with how.casting(model) as casts, watch_modules(model, recorder):
            held = called_with(step, swap, (fake_batch,))
        _refuse_other_readers(model)
        blocks = find_blocks(recorder.calls, recorder.ops, [s.packed for s in recorder.saves])
        recorder.mark(((f"{n}.grad", p.grad) for n, p in unique.items() if p.grad is not None), Kind.GRAD)
        updating = None
        if clone is not None:
            own = {id(p) for group in clone.param_groups for p in group["params"] if p.requires_grad}
            updated = {name: masters.get(name, p) for name, p in unique.items() if id(masters.get(name, p)) in own}
            updating = Updating(
                optimizer=clone, values=updated, narrow={n: unique[n] for n in masters}, sliced=device.type == "cuda"
            )
            if masters:
                record_narrow_update(recorder, updating, unique, group_parameters(list(unique), blocks))
            else:
                record_optimizer(recorder, clone)
        recorder.end_step()
        del held
        recorder.close()
        del buckets
        ops, tensors, saves = recorder.finish(align=block_of(device.type))
        with recorder.quiet():
            units = find_units(list(unique), blocks, ops, tensors, updating)
    timed = recorder.trials.is_timed
    recorder.trials.close()
    whole = find_whole(recorder.calls)
    return Recorded(
        ops=ops,
        tensors=tensors,
        saves=saves,
        blocks=blocks,
        units=units,
        whole=whole,
        asked=tuple(sorted(recorder.asked)),
        called=find_shapes(recorder.calls),
        autocast=recorder.autocast,
        casts=tuple(casts),
        given=find_given(recorder.calls, blocks),
        effects=find_effects(recorder.calls, recorder.ops, recorder.tensors),
        parts=any(call.path for call in recorder.calls),
        calls=sum(not call.path for call in recorder.calls),
        timed=timed,
        looked_at=tuple(sorted(n for n in values.looked_at if n >= 0)),
    )


def _refuse_other_readers(model: torch.nn.Module) -> None:
    """Refuse a model that reads a parameter outside its module, such as from a list: the parameter itself received
    a gradient."""
    found = [(name, p) for name, p in model.named_parameters() if isinstance(p.grad, FakeTensor)]
    for _, p in found:
        p.grad = None
    if found:
        raise UnknownValue(f"`{found[0][0]}` is read outside its module")


def _masters(
    model: torch.nn.Module, working: Mapping[str, torch.nn.Parameter], device: torch.device
) -> dict[str, torch.nn.Parameter]:
    """The trained masters, in their own dtype, of parameters that the model computes with in a lower precision."""
    return {
        name: torch.nn.Parameter(_fake_like(p, device))
        for name, p in model.named_parameters()
        if p.requires_grad and working[name].dtype != p.dtype
    }


def _fake_parameters(
    model: torch.nn.Module, device: torch.device, precision: torch.dtype | None
) -> tuple[dict[str, torch.nn.Parameter], dict[int, torch.Tensor]]:
    """Fakes by name (a tied parameter appears under each name, as the same object) and by the original's id."""
    by_id: dict[int, torch.nn.Parameter] = {}
    by_name: dict[str, torch.nn.Parameter] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in by_id:
            fake = _fake_like(p, device)
            if precision is not None and p.dtype == torch.float32:
                fake = fake.to(precision)
            by_id[id(p)] = torch.nn.Parameter(fake, requires_grad=p.requires_grad)
        by_name[name] = by_id[id(p)]
    return by_name, dict(by_id)


def _fake_like(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)


def _base_of(t: torch.Tensor, device: torch.device, bases: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """For a view of a larger tensor on the device: a fake of the whole, which stays in memory with it."""
    storage = t.untyped_storage() if t.layout is torch.strided and t.device.type == device.type else None
    if storage is None or storage.nbytes() <= t.nbytes:
        return None
    if storage._cdata not in bases:
        bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    return bases[storage._cdata]


def _fake_input(
    t: torch.Tensor, device: torch.device, values: KnownValues, made: dict[int, torch.Tensor], base: torch.Tensor | None
) -> torch.Tensor:
    if id(t) not in made:
        like = _fake_like(t, device)
        if base is not None:
            like.set_(base.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        made[id(t)] = like.requires_grad_(t.requires_grad)
        if t.device.type != "meta":
            values.tell(made[id(t)], t, len(made) - 1)
    return made[id(t)]


def _named_inputs(batch: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(batch, Mapping):
        items: Any = batch.items()
    elif isinstance(batch, (list, tuple)):
        items = enumerate(batch)
    else:
        items = [("input", batch)]
    named = []
    for name, value in items:
        for t in torch.utils._pytree.tree_leaves(value):
            if isinstance(t, torch.Tensor):
                named.append((f"batch.{name}", t))
    return named
