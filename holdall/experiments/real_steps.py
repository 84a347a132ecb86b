"""A few real training steps, planned or plain, to compare with the prediction."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdall.api import apply
from holdall.reporting import Report
from holdall.tracing.step import default_loss
from holdall.types import Plan


@dataclass(frozen=True, kw_only=True)
class RealRun:
    losses: tuple[float, ...]
    weights: Mapping[str, torch.Tensor]  # after the last step, on the host
    seconds: float  # a step: the median of those after the first
    report: Report | None  # None: plain training

    def equals(self, other: RealRun) -> bool:
        """Are all losses and weights bitwise equal?"""
        same = self.losses == other.losses and self.weights.keys() == other.weights.keys()
        return same and all(torch.equal(w, other.weights[name]) for name, w in self.weights.items())


def run_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Iterable[Any],
    *,
    plan: Plan | None = None,
    seed: int = 0,
    after_step: Callable[[int], None] = lambda step: None,  # noqa: ARG005
) -> RealRun:
    """A user's training loop. `plan`: applied to the model during the run; None: plain training.

    The budget is not enforced: a run that exceeds it is completed and judged by its measured peak.
    """
    gc.collect()  # garbage of earlier runs would count in the GPU's allocator
    torch.manual_seed(seed)
    losses, seconds = [], []
    report = None
    with apply(plan, model, optimizer, enforce=False) if plan is not None else nullcontext() as harness:
        for step, batch in enumerate(batches, 1):
            began = time.perf_counter()
            loss = default_loss(model, batch)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began)
            after_step(step)
        if harness is not None:
            if optimizer is None:
                harness.close()  # without an optimizer a step ends where the next begins, or here
            report = harness.report()
    weights = {name: w.detach().cpu().clone() for name, w in model.state_dict().items()}
    return RealRun(losses=tuple(losses), weights=weights, seconds=statistics.median(seconds[1:] or seconds), report=report)
