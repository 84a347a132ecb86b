"""A trace of an evaluation: the forward alone, with nothing saved for backward.

`trace_evaluation` runs the model in evaluation mode without gradients, on fakes. `evaluation_of` derives it from a training
trace if the model is not available: the forward without saved tensors. That still contains dropout, so it is a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from holdall.api import trace
from holdall.tracing.autocast import Autocast
from holdall.tracing.step import Loss, default_loss
from holdall.types import Phase, Trace


def trace_evaluation(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    precision: str | torch.dtype | None = None,
    autocast: Autocast = None,
    head: str | int = "auto",
) -> Trace:
    """Trace one evaluation of `model` on `batch`; its outputs are freed at once. Arguments as in `holdall.trace`."""
    inner = loss or default_loss

    def evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            value = inner(model, batch)
        return value.detach().requires_grad_()  # a leaf: its backward is empty and is cut off

    with _evaluating(model):
        traced = trace(model, batch, loss=evaluate, device=device, precision=precision, autocast=autocast, head=head)
        return _forward_alone(traced)


def evaluation_of(trace: Trace) -> Trace:
    """An upper bound of an evaluation of the traced step; exact for a model that behaves the same in evaluation mode."""
    return _forward_alone(trace)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; restores every module."""
    before = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = before[name]


def _forward_alone(whole: Trace) -> Trace:
    ops = tuple(op for op in whole.ops if op.site.phase is Phase.FORWARD)
    end = len(ops)
    tensors = {
        x: replace(t, saved=False, freed=None if t.freed is None or t.freed >= end else t.freed)
        for x, t in whole.tensors.items()
        if t.born < end
    }
    return replace(whole, ops=ops, tensors=tensors, blocks=(), saves=(), units=(), whole=None)
