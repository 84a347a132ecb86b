"""A tiny model with a batch whose activations matter, planned for part of its memory and run beside plain training."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

import holdall
from holdall.runtime.harness import Harness
from holdall.testing.chaos import chaos
from holdall.testing.contracts import train
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import family, machine
from holdall.types import Hardware, Plan, Trace

FAMILIES = ("tiny-vgg", "tiny-resnet", "tiny-bert", "tiny-gpt2", "tiny-llama")


def enlarged(name: str) -> tuple[torch.nn.Module, Any, torch.optim.Optimizer]:
    """The family with eight times its usual batch."""
    model, batch = family(name)
    if isinstance(batch, dict):
        batch = {k: v.repeat(8, *[1] * (v.dim() - 1)) for k, v in batch.items()}
    else:
        batch = tuple(t.repeat(8, *[1] * (t.dim() - 1)) for t in batch)
    return model, batch, _sgd(model)


@cache
def enlarged_trace(name: str) -> Trace:
    model, batch, optimizer = enlarged(name)
    return holdall.trace(model, batch, optimizer=optimizer)


def share_of(trace: Trace, share: float, hardware: Hardware) -> int:
    """The bytes held before a step, and this share of what plain training takes beyond."""
    plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted.peak[hardware.home.name]
    held = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    return held + int(share * (plain - held))


def planned(
    name: str, planner: str, share: float, *, rate: float = 1e8, hardware: Hardware | None = None, **options: Any
) -> Plan:
    """A plan for that share, on a machine whose link has this many bytes per second."""
    hardware = hardware or machine(overlap=True, read=rate, write=rate)
    trace = enlarged_trace(name)
    return holdall.plan(trace, budget=share_of(trace, share, hardware), planner=planner, hardware=hardware, **options)


def check_plan(
    name: str, plan: Plan, *, steps: int = 2, mode: str = "plain", first: bool = True, exact: bool = True
) -> Harness:
    """Run the plan: bits of plain training; peak, and bytes of each link in the last step, as predicted. `first`: the first
    step is as predicted, too. `exact` false: peak and bytes follow from values, and are not compared."""
    model, batch, optimizer = enlarged(name)
    return _beside_plain(
        model,
        batch,
        optimizer,
        lambda: holdall.apply(plan, model, optimizer),
        steps=steps,
        mode=mode,
        first=first and exact,
        exact=exact,
    )


def check_fit(name: str, plan: Plan, planner: str, *, rate: float = 1e8, steps: int = 2, online: bool = False) -> Harness:
    """The same through `fit`, with the plan's budget. `online`: decisions depend on the memory in use, and so on the copies of
    buffers that `fit` keeps for a failed step; bits and budget are compared."""
    model, batch, optimizer = enlarged(name)

    def begin() -> Harness:
        with planned_for(machine(overlap=True, read=rate, write=rate)):
            return holdall.fit(model, optimizer, batch, budget=plan.budget["cpu"], planner=planner)

    harness = _beside_plain(model, batch, optimizer, begin, steps=steps, mode="plain", first=not online, exact=not online)
    assert harness.plan.planner == planner and harness.plan.count() == plan.count()
    return harness


def _beside_plain(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    begin: Callable[[], Harness],
    *,
    steps: int,
    mode: str,
    first: bool,
    exact: bool = True,
) -> Harness:
    reference = copy.deepcopy(model)
    expected = train(reference, batch, _sgd(reference), steps)
    gc.collect()
    moved: list[dict[str, int]] = []
    with chaos(3, longest=0.001) if mode == "chaos" else nullcontext(), begin() as harness:
        copied = harness.stores.copied("cpu")
        optimizer.register_step_post_hook(lambda *_: moved.append(harness.stores.copied("cpu")))
        assert train(model, batch, optimizer, steps) == expected
    plan = harness.plan
    last = {link: size - (moved[-2] if steps > 1 else copied).get(link, 0) for link, size in moved[-1].items()}
    assert not exact or {link: size for link, size in last.items() if size} == dict(plan.predicted.traffic)
    if first and steps > 1:
        once = {link: size - copied.get(link, 0) for link, size in moved[0].items()}
        assert once == last
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())
    assert harness.notes == []
    assert not exact or harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert max(harness.step_peaks) <= plan.budget["cpu"]
    return harness


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)
