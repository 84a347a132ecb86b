"""`fit` against plain training: the same loop with and without, compared bit by bit.

A cell is a family and a budget, as a share of the peak that is predicted for plain training. It ends in one of five ways:
`equal` (losses, gradient norms, parameters, buffers and random state as in plain training, and within the budget), `refused`,
`different`, `over` (the run was stopped, or passed its budget), `failed` (any other error).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import holdall
from holdall.errors import HoldallError, Infeasible, OverBudget
from holdall.testing.families import FAMILIES, Family
from holdall.types import Trace

STEPS = 3
CHECKPOINTING = ("chen", "rotor", "zero_offload")
"""Planners that recompute block by block, in place of the user's own gradient checkpointing."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a loop saw and left behind."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    tensors: dict[str, torch.Tensor]
    drawn: float  # a random number after the loop

    def differs_from(self, other: Run) -> str:
        """What is not the same, or nothing."""
        if self.losses != other.losses:
            return f"losses {self.losses}, plain {other.losses}"
        if self.norms != other.norms:
            return f"gradient norms {self.norms}, plain {other.norms}"
        apart = [name for name, tensor in other.tensors.items() if not torch.equal(self.tensors[name], tensor)]
        if apart:
            return f"{len(apart)} of {len(other.tensors)} tensors, {apart[0]} among them"
        return "" if self.drawn == other.drawn else "the random state"


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A family without `fit`: what it computes, and its predicted peak."""

    run: Run
    trace: Trace
    peak: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    family: str
    kind: str
    share: int
    result: str  # equal, refused, different, over, failed
    budget: int
    plain_peak: int
    predicted: int | None = None
    measured: int | None = None
    smallest: int | None = None  # the least budget for which a plan was found, where refused
    actions: str = ""
    message: str = ""
    met_by: str = ""  # where refused: a planner that recomputes block by block and meets the budget
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Equal to plain training, or refused where checkpointing each block would not do either, with the peak named."""
        if self.result == "refused":
            return not self.met_by and bool(self.message)
        return self.result == "equal"


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    import numpy as np

    np.random.seed(number)


def make(family: Family) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """The family's model, batch and optimizer: the same ones at each call."""
    seed(0)
    model, batch = family.build()
    model.train()
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, step: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Run:
    """The loop: three steps, gradients clipped by their norm."""
    losses, norms = [], []
    for _ in range(STEPS):
        loss = step()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses=tuple(losses), norms=tuple(norms), tensors=tensors_of(model), drawn=float(torch.rand(())))


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Not copies: those would count as the loop's own memory."""
    return {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}


@lru_cache(maxsize=4)
def plain(name: str) -> Plain:
    """Kept for the other budget of the family."""
    family = FAMILIES[name]
    model, batch, optimizer = make(family)
    trace = holdall.trace(model, batch, optimizer=optimizer, loss=family.loss)
    peak = holdall.plan(trace, planner="nop").predicted.peak["cpu"]
    model, batch, optimizer = make(family)
    seed(1)
    run = train(model, lambda: family.loss_of(model, batch), optimizer)
    return Plain(run=run, trace=trace, peak=peak)


def compare(name: str, share: int) -> Cell:
    """One cell: `fit` with default options in `share` per cent of plain's peak."""
    family, began = FAMILIES[name], time.perf_counter()
    try:
        known = plain(name)
    except HoldallError as error:
        said = f"plain training: {type(error).__name__}: {_line(error)}"
        return Cell(family=name, kind=family.kind, share=share, result="failed", budget=0, plain_peak=0, message=said)
    budget = known.peak * share // 100
    model, batch, optimizer = make(family)
    found: dict[str, Any] = {}
    try:
        with holdall.fit(model, optimizer, batch, budget=budget, loss=family.loss) as harness:
            seed(1)
            run = train(model, lambda: family.loss_of(model, batch), optimizer)
            with _disable_current_modes():  # else the other run's tensors are counted too
                apart = run.differs_from(known.run)  # as whoever looks at the parameters sees them before the end
            report = harness.report()
        apart = apart or replace(run, tensors=tensors_of(model)).differs_from(known.run)
        found["predicted"] = report.predicted.peak.get("cpu")
        found["measured"] = report.measured.peak.get("cpu") if report.measured else None
        found["actions"] = " ".join(f"{n}x{k}" for k, n in sorted(report.plan.count().items()))
        found["message"] = apart or "; ".join(_line(note) for note in report.notes)
        found["result"] = _judge(apart, found["measured"], budget)
    except Infeasible as refused:
        found = {"result": "refused", "smallest": refused.smallest, "message": _line(refused)}
        found["met_by"] = met_by_checkpointing(known.trace, budget)
    except OverBudget as over:
        found = {"result": "over", "message": _line(over)}
    except Exception as error:
        found = {"result": "failed", "message": f"{type(error).__name__}: {_line(error)}"}
    seconds = time.perf_counter() - began
    return Cell(family=name, kind=family.kind, share=share, budget=budget, plain_peak=known.peak, seconds=seconds, **found)


def _judge(apart: str, measured: int | None, budget: int) -> str:
    if apart:
        return "different"
    return "equal" if measured is not None and measured <= budget else "over"


def met_by_checkpointing(trace: Trace, budget: int) -> str:
    """The first planner of those that recompute block by block whose plan fits the budget; empty: none does."""
    for planner in CHECKPOINTING:
        try:
            holdall.plan(trace, budget=budget, planner=planner)
        except HoldallError:
            continue
        return planner
    return ""


def _line(said: object) -> str:
    return " ".join(str(said).split())[:400]
