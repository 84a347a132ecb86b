"""Records one real step; the fallback for models whose control flow depends on values. The model is restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdall.attributes import left_as_found
from holdall.ops import called_with
from holdall.tracing.blocks import find_blocks, find_given, find_shapes
from holdall.tracing.modules import watch_modules
from holdall.tracing.recorder import Recorder
from holdall.tracing.step import How, Loss, Recorded, Step, materialise_state, record_narrow_update, record_optimizer
from holdall.tracing.timing.op_timing import Trials
from holdall.tracing.units import Updating, find_units, group_parameters
from holdall.tracing.values.effects import find_effects
from holdall.tracing.values.known import KnownValues
from holdall.types import Kind
from holdall.updates.parts import clone_optimizer


def record_real_step(
    model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, loss: Loss, how: How
) -> Recorded:
    """Run forward and backward for real, and the optimizer's step on fakes, so that no weight changes."""
    recorder = Recorder(
        values=KnownValues(None),
        real=True,
        trials=Trials(torch.device("cpu")),
        device=_kind(model),
        narrow=how.precision is not None,
    )
    parameters = dict(model.named_parameters())
    with _values_left_as_found(model), left_as_found(model), contextlib.ExitStack() as stack:
        stack.callback(recorder.originals.put_back)
        by_name = _working(model, how.precision)
        working = {name: by_name[name] for name in parameters}
        masters = {n: p for n, p in parameters.items() if optimizer is not None and p.requires_grad and working[n] is not p}
        recorder.seed(working.items(), Kind.PARAM)
        recorder.seed(((f"{name}.master", p) for name, p in masters.items()), Kind.STATE)
        recorder.seed(model.named_buffers(), Kind.BUFFER)
        recorder.seed((("batch", t) for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)), Kind.INPUT)
        recorder.name_parameters({id(p): name.rpartition(".")[0] for name, p in working.items()})
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[str, torch.nn.Parameter] = {}  # for the optimizer's step
        narrow: dict[str, torch.nn.Parameter] = {}  # of working copies that are not the parameters
        clone = None
        if optimizer is not None:
            recorder.values = KnownValues(mode)
            with mode, recorder.quiet(), recorder:
                fakes = {name: _fake(p) for name, p in parameters.items()}
                narrow = {name: _fake(working[name]) for name in masters}
                clone = clone_optimizer(optimizer, {id(p): fakes[name] for name, p in parameters.items()}, foreach=False)
                materialise_state(recorder, clone, {id(f): name for name, f in fakes.items()})
            recorder.values = KnownValues(None)
        step = Step(model, recorder, loss, how.autocast)
        stack.enter_context(recorder)
        with how.casting(model) as casts, watch_modules(model, recorder):
            if how.precision is None:
                held = step(batch)
            else:
                held = called_with(step, {f"model.{name}": p for name, p in by_name.items()}, (batch,))
        recorder.mark(((f"{n}.grad", p.grad) for n, p in working.items() if p.grad is not None), Kind.GRAD)
        blocks = find_blocks(recorder.calls, recorder.ops, [s.packed for s in recorder.saves])
        updating = None
        if clone is not None:
            own = {id(p) for group in clone.param_groups for p in group["params"] if p.requires_grad}
            stepped = {n: f for n, f in fakes.items() if id(f) in own}
            updating = Updating(optimizer=clone, values=stepped, narrow=narrow, sliced=False)
            recorder.values = KnownValues(mode)
            computed = {name: narrow.get(name, fake) for name, fake in fakes.items()}
            with mode, recorder.quiet():
                for name, p in working.items():
                    if p.grad is not None:
                        computed[name].grad = torch.empty_like(computed[name])
            _alias(recorder, working, computed)
            _alias(recorder, masters, fakes)
            with mode:
                if masters:
                    record_narrow_update(recorder, updating, computed, group_parameters(list(parameters), blocks))
                else:
                    record_optimizer(recorder, clone)
            recorder.values = KnownValues(None)
        recorder.end_step()
        del held
        recorder.close()
    ops, tensors, saves = recorder.finish()
    with mode:
        units = find_units(list(parameters), blocks, ops, tensors, updating)
    return Recorded(
        ops=ops,
        tensors=tensors,
        saves=saves,
        blocks=blocks,
        units=units,
        asked=tuple(sorted(recorder.asked)),
        called=find_shapes(recorder.calls),
        autocast=recorder.autocast,
        casts=tuple(casts),
        given=find_given(recorder.calls, blocks),
        effects=find_effects(recorder.calls, recorder.ops, recorder.tensors),
        parts=any(call.path for call in recorder.calls),
        calls=sum(not call.path for call in recorder.calls),
    )


def _working(model: torch.nn.Module, precision: torch.dtype | None) -> dict[str, torch.nn.Parameter]:
    """The parameters the model computes with, by every name: its own, or copies in another precision."""
    made: dict[int, torch.nn.Parameter] = {}
    for p in model.parameters():
        is_cast = precision is not None and p.dtype == torch.float32
        made[id(p)] = torch.nn.Parameter(p.detach().to(precision), requires_grad=p.requires_grad) if is_cast else p
    return {name: made[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def _fake(p: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(p), requires_grad=p.requires_grad)


def _kind(model: torch.nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _alias(recorder: Recorder, parameters: Mapping[str, torch.Tensor], fakes: Mapping[str, torch.Tensor]) -> None:
    """Identify the fakes of the optimizer's step with the real parameters and gradients."""
    for name, p in parameters.items():
        recorder.same(fakes[name], p)
        if p.grad is not None and fakes[name].grad is not None:
            recorder.same(fakes[name].grad, p.grad)


@contextmanager
def _values_left_as_found(model: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random state afterwards."""
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
            for p, _ in grads:
                p.grad = None
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
