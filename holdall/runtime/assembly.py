"""Builds the parts of a harness for the device that its model computes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from holdall.runtime.activations.resident import Resident
from holdall.runtime.arena.step_arena import StepArena
from holdall.runtime.arena.together import close_gaps, move_together
from holdall.runtime.budget.meter import CpuMeter, CudaMeter, Meter, device_context
from holdall.runtime.states.engine import Engine
from holdall.runtime.states.placement import Placing
from holdall.runtime.states.weights.cache import Gauge
from holdall.sharded import local_of, sharded_parameter
from holdall.tiers._keepers import Keepers
from holdall.types import Plan, Progress

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


def make_meter(device: torch.device, plan: Plan, there: Callable[[], Iterable[torch.Tensor]]) -> Meter:
    """The meter for the peaks of steps. `there`: lists the tensors on the device when counting starts."""
    if device.type == "cpu":
        return CpuMeter(there)
    return CudaMeter(device, context=plan.about.context)


def lie_close(harness: Harness) -> None:
    """Close gaps between the tensors that are on the device already."""
    close_gaps(_at_rest(harness), harness.device)


def _at_rest(harness: Harness) -> list[torch.Tensor]:
    """The tensors on the device, when nothing moves or updates them any more."""
    if harness.engine is not None:
        harness.engine.settle()
    return find_there(harness.model, harness.optimizer, harness.engine)


def use_arena(harness: Harness, meter: Meter) -> Callable[[], None]:
    """Give the tensors of steps their planned offsets, if the plan has a layout. Returns the function that undoes it."""
    layout = harness.plan.about.layout
    if layout is None:
        return lambda: None

    def make_room() -> None:
        move_together(_at_rest(harness), harness.device)

    engine = harness.engine
    arena = harness.arena = meter.arena = StepArena(layout, harness.device, note=harness.note(), make_room=make_room)

    def undo() -> None:
        harness.arena = meter.arena = None
        is_held = arena.counts.live > 0  # by what stays, such as gradients: it would keep all of the memory
        arena.close()
        if is_held and harness.engine is engine:  # else all of it is leaving
            make_room()

    return undo


def make_engine(harness: Harness, placing: Placing, progress: Progress) -> Engine:
    """The engine that keeps model states where the plan places them."""

    def tell(storage: torch.UntypedStorage) -> None:
        if harness.ledger is not None:  # there is none before the meter starts
            harness.ledger.see(storage, "weights")

    return Engine(
        harness.model,
        harness.optimizer,
        placing,
        store=Keepers(harness.stores, harness.stores.near) if harness.store is not None else None,
        device=harness.device,
        calls=[name for name, _ in harness.plan.about.blocks],
        tell=tell,
        quiet=harness.quiet,
        progress=progress,
    )


def make_gauge(device: torch.device, meter: Meter, budget: int, busy: Callable[[], bool]) -> Gauge:
    """Measures how much memory evaluations may use for cached weights. `busy`: a step is being measured."""
    outside = device_context(device) if device.type == "cuda" else 0
    return Gauge(budget, ledger=meter.ledger, device=device, outside=outside, busy=busy)


def find_resident(model: torch.nn.Module, engine: Engine | None, plan: Plan) -> Resident:
    """The storages of parameters and buffers, which stay on the device."""
    storages = [local_of(t).untyped_storage() for t in (*model.parameters(), *model.buffers())]
    storages += engine.storages() if engine is not None else []
    as_whole = not any(action.over_ranks for action in plan.actions)
    return Resident((s._cdata for s in storages), in_shards=bool(sharded_parameter(model)), as_whole=as_whole)


def find_there(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, engine: Engine | None) -> list[torch.Tensor]:
    """The tensors on the device between steps."""
    if engine is not None:
        return [*engine.tensors(), *model.buffers()]
    found: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        found += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return found
