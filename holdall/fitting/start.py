"""THE fit: traces, plans, and installs the plan on the model, for raw loops and trainers alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from holdall import api
from holdall.errors import HoldallError, InvalidInput
from holdall.fitting.arguments import check_arguments
from holdall.fitting.head import fewest_rows, has_room_for_outputs, or_in_chunks
from holdall.fitting.plan_book import PlanBook
from holdall.fitting.request import FitRequest
from holdall.problem import make_problem, resolve_optimizer
from holdall.runtime.harness import Harness
from holdall.runtime.programs.compiled import resolve_backend
from holdall.runtime.switching.recast import Prepared, Recast
from holdall.tracing import target_device
from holdall.tracing.autocast import resolve_autocast
from holdall.types import Plan, Trace
from holdall.types.plan import silent
from holdall.updates.planned import refuse_planned

_SIMPLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chen", {"variant": "all", "last": True}),  # standard gradient checkpointing
    ("zero_offload", {"overlap": True}),
)


class Room(Protocol):
    """Reserves a part of the budget, for a trainer."""

    def explaining(self) -> AbstractContextManager[None]:
        """A context around planning that rephrases errors in terms of the whole budget."""
        ...

    def as_measured(self, plan: Plan, trace: Trace) -> Plan:
        """The plan with the predictions that will be measured, including the reserved part."""
        ...


def start(
    request: FitRequest,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str | None,
    batch: Any,
    *,
    room: Room | None = None,
) -> Harness:
    """Returns the harness, switched on. `request.budget` is the budget to plan for; `room` knows the whole budget."""
    check_arguments(model, optimizer, batch, request)
    optimizer = resolve_optimizer(optimizer, model)
    refuse_planned(model)
    if request.mesh is not None:
        from holdall.fitting.on_ranks import start_on_ranks

        with nullcontext() if room is None else room.explaining():
            return start_on_ranks(request, model, optimizer, batch, adjust=None if room is None else room.as_measured)
    is_compiled = resolve_backend(request.compile) is not None  # refuse a bad name before anything slow
    told = request.progress or silent
    on = request.device if request.device is not None else device_of_batch(batch)
    cast = resolve_autocast(request.autocast, target_device(model, on).type) or False
    planning = {**request.asked, "reads_gradients": request.reads_gradients}

    def adjust(plan: Plan, trace: Trace) -> Plan:
        made = to_be_compiled(planning, plan, trace) if is_compiled else plan
        return made if room is None else room.as_measured(made, trace)

    sizes = PlanBook(
        model,
        batch,
        tracing={
            "optimizer": optimizer,
            "loss": request.loss,
            "device": on,
            "precision": request.precision,
            "autocast": cast,
            "head": request.head,
        },
        planning={**planning, "planner": request.planner, "progress": told, **request.options},
        adjust=adjust,
    )

    if request.plan is not None and request.lengths is not None:
        raise InvalidInput("`plan` is for one size, and `lengths` asks for several", hint="leave one of them out")
    given = Plan.load(request.plan) if isinstance(request.plan, (str, Path)) else request.plan

    rows = None if given is not None or request.lengths is not None else fewest_rows(model, batch, request.head, request.allow)

    def prepare() -> Prepared:
        with nullcontext() if room is None else room.explaining():
            return or_in_chunks(found, request.head, rows, told)

    def found(head: str | int) -> tuple[Prepared, bool]:
        """What is applied, and whether the loop can keep what the model returns."""
        sizes.set_head(head)
        try:
            return planned()
        except HoldallError:
            sizes.set_head(request.head)
            raise

    def planned() -> tuple[Prepared, bool]:
        if request.lengths is not None:
            made, buckets = sizes.buckets(request.lengths)
            return Prepared(plan=made, buckets=buckets), True
        made, traced = sizes.sample(given)
        fallbacks = () if is_compiled else tuple(sizes.know(f, traced) for f in _fallbacks(made, traced, request.asked))
        is_corrected = traced.about.device == "cuda" and made.planner == "auto" and not is_compiled
        if is_corrected:
            sizes.expect_corrections(made, traced)
        prepared = Prepared(plan=made, fallbacks=fallbacks, correct=sizes.correct if is_corrected else None)
        return prepared, has_room_for_outputs(made, traced)

    made = prepare()
    harness = api.apply(
        made.plan,
        model,
        optimizer,
        enforce=request.enforce,
        fallbacks=made.fallbacks,
        correct=made.correct,
        buckets=made.buckets,
        tighten=sizes.tighten if request.repeat else None,
        recast=Recast(make=partial(sizes.recast, prepare), forget=sizes.put_aside),
        record=request.record,
        compile=request.compile,
        progress=told,
    )
    if request.layout and made.plan.about.layout is None:
        harness.note()(f"no plan fits with layout `{request.layout}`: torch's allocator decides where tensors lie")
    return harness


def to_be_compiled(given: Mapping[str, Any], plan: Plan, trace: Trace) -> Plan:
    """Make every possible block a program, also kept ones, so that compiled and eager blocks are not mixed."""
    from holdall.planning.to_programs import by_programs

    return by_programs(make_problem(trace, **given), plan)


def _fallbacks(made: Plan, traced: Trace, asked: Mapping[str, Any]) -> Iterator[Plan]:
    """Simple plans that fit: every block recomputed, with the optimizer on the device or on the host."""
    if made.planner != "auto" or traced.about.device != "cuda" or not made.actions:
        return  # times are meaningless, or the plan does nothing
    for planner, options in _SIMPLE:
        with suppress(HoldallError):
            yield api.plan(traced, planner=planner, **options, **asked)


def device_of_batch(batch: Any) -> torch.device | None:
    """The batch's device, if it is a GPU."""
    devices = {t.device for t in tree_leaves(batch) if isinstance(t, torch.Tensor)}
    return next((d for d in devices if d.type == "cuda"), None)
