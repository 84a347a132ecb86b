"""For tests of planners that place states: traced families, steps compared with plain training, and small traced steps."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

import holdall
from holdall.planning.chunk_tracer import TracedStates, UseMoment
from holdall.runtime.harness import Harness
from holdall.testing.chaos import chaos
from holdall.testing.worlds import family, machine
from holdall.tracing.step import default_loss
from holdall.types import Hardware, Plan, Trace, Unit


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@cache
def traced_family(name: str, precision: str | None = None) -> Trace:
    model, batch = family(name)
    return holdall.trace(model, batch, optimizer=adamw(model), precision=precision)


def plain_peak(name: str) -> int:
    return holdall.plan(traced_family(name), planner="nop", hardware=machine()).predicted.peak["cpu"]


def plan_family(name: str, planner: str, share: float = 1.0, *, hardware: Hardware | None = None, **options: Any) -> Plan:
    """A plan with a share of plain training's peak."""
    budget = int(share * plain_peak(name))
    return holdall.plan(
        traced_family(name), budget=budget, planner=planner, hardware=hardware or machine(overlap=True), **options
    )


def train_clipped(
    model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, *, reads_gradients: bool = True
) -> list[float]:
    """Three steps; seeded, so that dropout can be compared."""
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = default_loss(model, batch)
        loss.backward()
        if reads_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_beside_plain(
    name: str, plan: Plan | None = None, *, seed: int | None = None, reads_gradients: bool = True, **fit: Any
) -> tuple[bool, Harness]:
    """Train a family plainly and under a plan, or under `holdall.fit(..., **fit)`: (same bits everywhere, the harness).

    `seed`: in chaos mode.
    """
    model, batch = family(name)
    reference = copy.deepcopy(model)
    expected = train_clipped(reference, batch, adamw(reference), reads_gradients=reads_gradients)
    optimizer = adamw(model)
    gc.collect()
    with chaos(seed=seed) if seed is not None else nullcontext():
        if plan is None:
            harness = holdall.fit(model, optimizer, batch, reads_gradients=reads_gradients, **fit)
        else:
            harness = holdall.apply(plan, model, optimizer, enforce=False)
        with harness:
            losses = train_clipped(model, batch, optimizer, reads_gradients=reads_gradients)
    mine, theirs = model.state_dict(), reference.state_dict()
    return losses == expected and all(torch.equal(mine[k], theirs[k]) for k in theirs), harness


def measured_as_predicted(harness: Harness, *, within: float = 0.0) -> bool:
    """Are the bytes on every link those of the plan, and the last step's peak too, or less by at most a share `within`?"""
    predicted, measured = harness.plan.predicted, harness.measured()
    assert measured is not None
    most = predicted.peak["cpu"]
    return measured.traffic == predicted.traffic and (1 - within) * most <= harness.step_peaks[-1] <= most


def step_of_units(sizes: list[int], others: list[int] | int = 0, *, width: int = 2, state_width: float = 12) -> TracedStates:
    """A forward over units of one parameter each and a backward in reverse. `others`: bytes by moment, or always."""
    units = tuple(
        Unit(id=n, name=f"u{n}", params=(f"u{n}.w",), weights=(n,), grads=(), states=(), numel=size, moved=0, workspace=0)
        for n, size in enumerate(sizes)
    )
    order = [*range(len(sizes)), *reversed(range(len(sizes)))]
    free = others if isinstance(others, list) else [others] * len(order)
    return TracedStates(
        units=units,
        fixed=frozenset(),
        moments=tuple(UseMoment(unit=u, is_backward=n >= len(sizes), others=free[n]) for n, u in enumerate(order)),
        params=tuple(enumerate(sizes)),
        width=width,
        state_width=state_width,
    )


def fewest_loads(accesses: list[int], blocks: int) -> int:
    """Over all ways to evict."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chunk in accesses:
        after: dict[frozenset[int], int] = {}
        for here, loads in states.items():
            if chunk in here:
                choices = [(here, loads)]
            elif len(here) < blocks:
                choices = [(here | {chunk}, loads + 1)]
            else:
                choices = [(here - {out} | {chunk}, loads + 1) for out in here]
            for key, cost in choices:
                after[key] = min(cost, after.get(key, cost))
        states = after
    return min(states.values())
