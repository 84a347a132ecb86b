"""One real step, watched; the fallback for models that decide by their values. The model is left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdall.optim._part import clone_optimizer
from holdall.tracing.blocks import find_blocks, find_shapes
from holdall.tracing.modules import watch_modules
from holdall.tracing.recorder import Recorder
from holdall.tracing.step import Loss, Recorded, Step, materialise_state, record_optimizer
from holdall.tracing.trials import Trials
from holdall.tracing.units import Updating, find_units
from holdall.tracing.values import KnownValues
from holdall.types import Kind


def record_real_step(model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, loss: Loss) -> Recorded:
    """Forward and backward run for real; the optimizer's step runs on fakes, so that no weight changes."""
    recorder = Recorder(values=KnownValues(None), real=True, trials=Trials(torch.device("cpu")))
    parameters = dict(model.named_parameters())
    with _left_as_found(model), contextlib.ExitStack() as stack:
        recorder.seed(parameters.items(), Kind.PARAM)
        recorder.seed(model.named_buffers(), Kind.BUFFER)
        recorder.seed((("batch", t) for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)), Kind.INPUT)
        recorder.name_parameters({id(p): name.rpartition(".")[0] for name, p in parameters.items()})
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = {}
        clone = None
        if optimizer is not None:
            recorder.values = KnownValues(mode)
            with mode, recorder.quiet(), recorder:
                made: dict[int, torch.nn.Parameter] = {}
                for p in parameters.values():
                    if id(p) not in made:
                        made[id(p)] = torch.nn.Parameter(torch.empty_like(p), requires_grad=p.requires_grad)
                fakes = {name: made[id(p)] for name, p in parameters.items()}
                clone = clone_optimizer(optimizer, dict(made), foreach=False)
                materialise_state(recorder, clone, {id(f): name for name, f in fakes.items()})
            recorder.values = KnownValues(None)
        step = Step(model, recorder, loss)
        stack.enter_context(recorder)
        with watch_modules(model, recorder):
            held = step(batch)
        recorder.mark(((f"{n}.grad", p.grad) for n, p in parameters.items() if p.grad is not None), Kind.GRAD)
        if clone is not None:
            recorder.values = KnownValues(mode)
            with mode, recorder.quiet():
                for name, p in parameters.items():
                    if p.grad is not None:
                        fakes[name].grad = torch.empty_like(fakes[name])
            _alias(recorder, parameters, fakes)
            with mode:
                record_optimizer(recorder, clone)
            recorder.values = KnownValues(None)
        recorder.close()
        del held
    ops, tensors, saves = recorder.finish()
    blocks = find_blocks(recorder.calls, ops, [s.packed for s in saves])
    updating = None
    if clone is not None:
        own = {id(p) for group in clone.param_groups for p in group["params"]}
        updating = Updating(optimizer=clone, values={n: f for n, f in fakes.items() if id(f) in own}, narrow={}, sliced=False)
    with mode:
        units = find_units(list(parameters), blocks, ops, tensors, updating)
    called = find_shapes(recorder.calls)
    return Recorded(
        ops=ops, tensors=tensors, saves=saves, blocks=blocks, units=units, asked=tuple(recorder.asked), called=called
    )


def _alias(recorder: Recorder, parameters: dict[str, torch.nn.Parameter], fakes: dict[str, torch.nn.Parameter]) -> None:
    """The fakes that the optimizer steps over count as the real parameters and gradients that they stand for."""
    for name, p in parameters.items():
        recorder.same(fakes[name], p)
        if p.grad is not None and fakes[name].grad is not None:
            recorder.same(fakes[name].grad, p.grad)


@contextmanager
def _left_as_found(model: torch.nn.Module) -> Iterator[None]:
    """Gradients, buffers and random state are put back."""
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
