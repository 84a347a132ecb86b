"""For tests of planners that place model states: tiny models trained plainly and under a plan, compared bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import holdall
from holdall.runtime.harness import Harness
from holdall.testing.chaos import chaos
from holdall.testing.worlds import family, machine
from holdall.tracing.step import default_loss
from holdall.types import Hardware, Link, Outcome, Plan, Tier, Trace

FAMILIES = ("tiny-gpt2", "tiny-llama", "convnet")


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@cache
def trace_of(name: str, precision: str | None = None) -> Trace:
    """The trace of a family's step with AdamW; made once."""
    model, batch = family(name)
    return holdall.trace(model, batch, optimizer=adamw(model), precision=precision)


def with_disk(*, overlap: bool = False, read: float = 1e8, write: float = 1e8) -> Hardware:
    """A machine with a disk behind the device's memory, at rates of no machine in particular."""
    there = machine(overlap=overlap)
    links = (Link(source="cpu", destination="nvme", rate=write), Link(source="nvme", destination="cpu", rate=read))
    disk = Tier(name="nvme", capacity=2**50, read=read, write=write)
    return replace(there, tiers=(*there.tiers, disk), links=links)


def train(
    model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, *, clip: float | None = 0.1, steps: int = 3
) -> list[float]:
    """The loop of a user: losses of some steps."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = default_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cache
def plainly(name: str, clip: float | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of plain training; made once."""
    model, batch = family(name)
    losses = train(model, batch, adamw(model), clip=clip)
    return losses, [p.detach().clone() for p in model.parameters()]


def check_under(
    plan: Plan, name: str, *, clip: float | None = 0.1, around: AbstractContextManager[Any] | None = None, exact: bool = True
) -> Outcome:
    """Train under the plan: the bits of plain training, and the bytes that were predicted. What was measured."""
    expected, weights = plainly(name, clip)
    model, batch = family(name)
    optimizer = adamw(model)
    gc.collect()
    with around or nullcontext(), holdall.apply(plan, model, optimizer, enforce=False) as harness:
        losses = train(model, batch, optimizer, clip=clip)
        optimizer.state_dict()  # waits for updates that are under way, whose bytes count
        measured = harness.measured()
    assert measured is not None and harness.notes == [], harness.notes
    assert dict(measured.traffic) == dict(plan.predicted.traffic)
    if around is None:  # chaos puts copies off: memory is let go of later
        assert harness.step_peaks[-1] == plan.predicted.peak[next(iter(plan.predicted.peak))]
    if exact:
        assert losses == expected, (losses, expected)
        same = [torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True)]
        assert all(same), same
    return measured


def check_fit(name: str, budget: Any, planner: str, *, clip: float | None = 0.1, **options: Any) -> Plan:
    """The same by `fit`: losses and weights of plain training. The plan."""
    expected, weights = plainly(name, clip)
    model, batch = family(name)
    optimizer = adamw(model)
    with holdall.fit(
        model, optimizer, batch, budget=budget, planner=planner, reads_gradients=clip is not None, **options
    ) as harness:
        assert train(model, batch, optimizer, clip=clip) == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    assert harness.plan.planner == planner
    return harness.plan


def plain_peak(name: str) -> int:
    return holdall.plan(trace_of(name), planner="nop", hardware=machine()).predicted.peak["cpu"]


def plan_family(name: str, planner: str, share: float = 1.0, *, hardware: Hardware | None = None, **options: Any) -> Plan:
    """A plan with a share of plain training's peak."""
    budget = int(share * plain_peak(name))
    return holdall.plan(trace_of(name), budget=budget, planner=planner, hardware=hardware or machine(overlap=True), **options)


def run_beside_plain(
    name: str, plan: Plan | None = None, *, seed: int | None = None, reads_gradients: bool = True, **fit: Any
) -> tuple[bool, Harness]:
    """Train a family plainly and under a plan, or under `holdall.fit(..., **fit)`: (same bits everywhere, the harness).

    `seed`: in chaos mode.
    """
    clip = 0.1 if reads_gradients else None
    model, batch = family(name)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference), clip=clip)
    optimizer = adamw(model)
    gc.collect()
    with chaos(seed=seed) if seed is not None else nullcontext():
        if plan is None:
            harness = holdall.fit(model, optimizer, batch, reads_gradients=reads_gradients, **fit)
        else:
            harness = holdall.apply(plan, model, optimizer, enforce=False)
        with harness:
            losses = train(model, batch, optimizer, clip=clip)
    mine, theirs = model.state_dict(), reference.state_dict()
    return losses == expected and all(torch.equal(mine[k], theirs[k]) for k in theirs), harness


def measured_as_predicted(harness: Harness, *, within: float = 0.0) -> bool:
    """Are the bytes on every link those of the plan, and the last step's peak too, or less by at most a share `within`?"""
    predicted, measured = harness.plan.predicted, harness.measured()
    assert measured is not None
    most = predicted.peak["cpu"]
    return measured.traffic == predicted.traffic and (1 - within) * most <= harness.step_peaks[-1] <= most


def place_of(plan: Plan) -> Any:
    return next(a for a in plan.actions if a.name == "place")


def rows_of(plan: Plan) -> dict[str, tuple[str, str]]:
    """Unit -> (weights, update) of a plan."""
    return {unit: (weights, update) for unit, weights, update in place_of(plan).units}


def rolled(batch: Any, count: int) -> list[Any]:
    """Micro-batches that differ: the rows of a batch in other orders, and other tokens."""
    found = []
    for n in range(count):
        part = copy.deepcopy(batch)
        tensors: Sequence[torch.Tensor] = list(part.values()) if isinstance(part, dict) else list(part)
        for t in tensors:
            t.copy_(t.flatten().roll(n * 3 + 1).view(t.shape))
        found.append(part)
    return found
