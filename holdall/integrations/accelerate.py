"""`accelerate`: one line after (or before) `accelerator.prepare`.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
fitting = holdall.integrations.accelerate.fit(accelerator, model, optimizer, budget="24GiB")
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from holdall.errors import InvalidInput, Unsupported
from holdall.fitting.request import FitRequest
from holdall.integrations._accelerate_saving import AcceleratorSaving
from holdall.integrations._fitting import Fitting, need
from holdall.problem import Budget
from holdall.tracing.step import Loss

_accelerate = need("accelerate", what="holdall.integrations.accelerate", package="accelerate", extra="hf")


def fit(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    batch: Any = None,
    *,
    budget: Budget = "auto",
    planner: str = "auto",
    loss: Loss | None = None,
    **options: Any,
) -> Fitting:
    """Train inside a budget from the first step on; `close()` or a `with` block removes the plan.

    `batch`: plan for this one, now; otherwise for the first batch in training. `options`: other arguments of `holdall.fit`;
    accumulation is taken from the accelerator.

    On several processes the model is sharded over them (`mesh="auto"` unless given), so it must not be prepared, and `batch` is
    needed: `fit(accelerator, model, optimizer, batch)`, then `accelerator.prepare(optimizer, loader)`.
    """
    if accelerator.num_processes > 1:
        _check_ranks(accelerator, model, batch)
        options.setdefault("mesh", "auto")
    if "accumulate" in options:
        raise InvalidInput(
            "`accumulate` is taken from the accelerator", hint="use `Accelerator(gradient_accumulation_steps=...)`"
        )
    steps = accelerator.gradient_accumulation_steps
    request = FitRequest.of(budget=budget, planner=planner, loss=loss, accumulate=steps, **options)
    wrapped = isinstance(optimizer, _accelerate.optimizer.AcceleratedOptimizer)
    own = accelerator.unwrap_model(model, keep_torch_compile=True)
    is_prepared = hasattr(own, "_original_forward")  # its forward then enters the accelerator's autocast
    fitting = Fitting(
        own,
        optimizer.optimizer if wrapped else optimizer,
        request,
        tracing=nullcontext if is_prepared else accelerator.autocast,
    )
    if batch is not None:
        try:
            fitting.start(batch)
            if accelerator.num_processes > 1:
                fitting.undo.append(
                    AcceleratorSaving(accelerator, own, getattr(optimizer, "optimizer", optimizer)).keep_alone()
                )
        except BaseException:
            fitting.close()
            raise
    return fitting


def _check_ranks(accelerator: Any, model: torch.nn.Module, batch: Any) -> None:
    """On several processes, holdall is the one who divides the model."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) or model in accelerator._models:
        raise Unsupported(
            f"the accelerator has prepared the model for {accelerator.num_processes} processes, and holdall shards it itself",
            hint="call `fit(accelerator, model, optimizer, batch)` first, then `accelerator.prepare(optimizer, loader)`",
        )
    if batch is None:
        raise InvalidInput(
            f"a model is sharded over {accelerator.num_processes} processes before its first forward, so a batch is needed",
            hint="pass one: `fit(accelerator, model, optimizer, batch, budget=...)`",
        )
