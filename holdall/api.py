"""The four verbs, trace -> plan -> apply -> report, and `fit`, which does the first three."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from holdall.fitting.applying import check_belongs, store_for
from holdall.fitting.head import choose_head
from holdall.problem import Budget, make_problem, resolve_precision
from holdall.registry import build_member
from holdall.reporting import BlockRow, Report
from holdall.reporting.progress import terminal_line
from holdall.runtime.harness import Harness, refuse_planned
from holdall.runtime.head.lazy_logits import chunk_head
from holdall.runtime.programs.compiled import resolve_backend
from holdall.runtime.switching.buckets import Buckets
from holdall.runtime.switching.recast import Recast
from holdall.runtime.switching.retry import Tighten
from holdall.runtime.switching.trials import Correct
from holdall.tracing import check_model, trace_step
from holdall.tracing.autocast import Autocast
from holdall.tracing.calls import Given
from holdall.types import Hardware, Plan, Progress, Trace
from holdall.types.plan import silent


def trace(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Any = None,
    device: str | torch.device | None = None,
    precision: str | torch.dtype | None = None,
    autocast: Autocast = None,
    head: str | int = "auto",
) -> Trace:
    """Record one training step of a model on fake tensors, without needing its memory.

    `batch` is what the loop passes to the model: a mapping (`model(**batch)`), a tuple (`model(*batch)`) or one tensor. `loss`:
    a function `(model, batch) -> scalar`, if the model does not return `.loss`. `device`: trace for this device ("cuda" works
    on a machine without one); by default the model's, or the CPU for a model on the meta device. `precision`: "bf16" computes
    with bf16 copies of the float32 parameters, while the optimizer updates the parameters themselves. `autocast`: the dtype of
    the loop's `torch.autocast` around forward and loss ("bf16", "fp16", a dtype, True for the device's default, False for
    none); None: the caller's current autocast. `head`: compute the logits of the vocabulary head "whole", in chunks of this
    many rows, or choose by their size ("auto").
    """
    given: dict[str, Any] = {"loss": loss, "device": device, "precision": precision, "autocast": autocast, "head": head}
    return trace_calls(model, batch, optimizer=optimizer, **given)[0]


def trace_calls(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Any = None,
    device: str | torch.device | None = None,
    precision: str | torch.dtype | None = None,
    autocast: Autocast = None,
    head: str | int = "auto",
) -> tuple[Trace, dict[str, Given]]:
    """`trace`, and the arguments of each block's call."""
    dtype = resolve_precision(precision)
    chunked = choose_head(model, batch, head)
    given: dict[str, Given] = {}
    record = partial(trace_step, optimizer=optimizer, loss=loss, device=device, precision=dtype, autocast=autocast, given=given)
    if chunked is None:
        return record(model, batch), given
    path, rows = chunked
    undo = chunk_head(model.get_submodule(path), rows=rows)
    try:
        traced = record(model, batch)
    finally:
        undo()
    return replace(traced, about={**traced.about, "head": {"module": path, "rows": rows}}), given


def plan(
    trace: Trace | str | Path,
    *,
    budget: Budget = "auto",
    planner: str = "auto",
    hardware: Hardware | str | Path | None = None,
    allow: Iterable[str] | None = None,
    clips: bool = True,
    accumulate: int = 1,
    progress: Progress = silent,
    **options: Any,
) -> Plan:
    """Choose actions so that a step fits `budget`; raises `Infeasible` if no plan does.

    `budget`: bytes of the accelerator's memory as a number, "24GiB", a fraction of the device, "auto" (all of it), or one value
    per tier (`{"gpu": "24GiB", "cpu": "64GiB"}`). `hardware`: a `Hardware`, the path of one, the name of a GPU, or None to
    probe this machine. `allow`: names of the actions that may be used. `clips`: whether the loop reads or changes gradients
    between backward and step; if not, parameters may be updated in backward. `accumulate`: backwards per step. `options` go to
    the planner.
    """
    from holdall.fitting.remembering import remember_plan

    chosen = build_member("planners", planner, options, f"planner {planner}")
    read = Trace.load(trace) if isinstance(trace, (str, Path)) else trace
    problem = make_problem(
        read, budget=budget, hardware=hardware, allow=allow, clips=clips, accumulate=accumulate, progress=progress
    )
    with _no_collection():
        return remember_plan(problem, chosen, lambda: chosen(problem))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off: a planner makes millions of small objects without cycles, and collecting takes a quarter of
    its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def apply(
    plan: Plan | str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    enforce: bool = True,
    fallbacks: Sequence[Plan] = (),
    correct: Correct | None = None,
    buckets: Buckets | None = None,
    tighten: Tighten | None = None,
    recast: Recast | None = None,
    record: str | Path | None = None,
    compile: bool | str = False,  # noqa: A002
    progress: Progress = silent,
) -> Harness:
    """Install a plan on a model. The training loop stays unchanged; closing the harness restores the model.

    `enforce`: stop the run at the op that exceeds the budget. `compile`: run blocks that are planned op by op as fused kernels,
    by "inductor" (True) or another back end of `torch.compile`; sums are then added in another order. `record`: a folder for
    out-of-memory reports.

    `fit` supplies the others. `fallbacks`: plans to switch to if this one is measured slower. `correct`: makes a plan from
    measured times. `buckets`: plans for other batch sizes. `tighten`: makes a tighter plan, under which a step that ran out of
    memory is retried. `recast`: makes the plans again if the first forward runs under another autocast than traced.
    """
    read = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    backend = resolve_backend(compile)
    check_model(model)
    refuse_planned(model)
    check_belongs(read, model, optimizer)

    def make_store(plan: Plan) -> Any:
        return store_for(plan, model)

    return Harness(
        read,
        model,
        optimizer,
        store=make_store(read),
        enforce=enforce,
        make_report=make_report,
        make_store=make_store,
        fallbacks=fallbacks,
        correct=correct,
        buckets=buckets,
        tighten=tighten,
        recast=recast,
        record=record,
        backend=backend,
        progress=progress,
    )


P = ParamSpec("P")
R = TypeVar("R")


def _shown(call: Callable[P, R]) -> Callable[P, R]:
    """Show progress on the terminal, if there is one and the caller has passed no `progress`."""

    @wraps(call)
    def shown(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("progress") is not None:
            return call(*args, **kwargs)
        with terminal_line() as told:
            kwargs["progress"] = told
            return call(*args, **kwargs)

    return shown


@_shown
def fit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    *,
    budget: Budget = "auto",
    planner: str = "auto",
    loss: Any = None,
    hardware: Hardware | str | Path | None = None,
    allow: Iterable[str] | None = None,
    device: str | torch.device | None = None,
    precision: str | torch.dtype | None = None,
    autocast: Autocast = None,
    head: str | int = "auto",
    clips: bool = True,
    accumulate: int = 1,
    enforce: bool = True,
    lengths: str | Iterable[Any] | None = None,
    repeat: bool = True,
    record: str | Path | None = None,
    compile: bool | str = False,  # noqa: A002
    progress: Progress | None = None,
    **options: Any,
) -> Harness:
    """Trace, plan and apply in one call. Returns the harness, switched on; `close()` or a `with` block removes it.

    A model on the CPU whose batch is on the GPU trains on the GPU: the plan decides which parts of it move there. `lengths`:
    other batch sizes to expect, as lengths, as pairs (rows, length) or as batches; "auto": plans are made when a size first
    occurs. `autocast`: see `trace`; if the loop's first forward runs under another, the step is traced and planned again before
    it runs. `repeat`: retry a step that runs out of memory under a tighter plan. `record`: a folder for out-of-memory reports.
    `compile`: see `apply`; plans are then not corrected by measured times, which are those of other kernels. `progress`:
    receives the stages; None: a line on the terminal, if there is one. Measurements, traces and plans are cached on disk for
    the next run (`holdall cache`). The other arguments are those of `trace` and `plan`.
    """
    from holdall.fitting.request import FitRequest
    from holdall.fitting.start import start

    request = FitRequest(
        budget=budget,
        planner=planner,
        loss=loss,
        hardware=hardware,
        allow=allow,
        device=device,
        precision=precision,
        autocast=autocast,
        head=head,
        clips=clips,
        accumulate=accumulate,
        enforce=enforce,
        lengths=lengths,
        repeat=repeat,
        record=record,
        compile=compile,
        progress=progress,
        options=options,
    )
    return start(request, model, optimizer, batch)


def make_report(harness: Harness) -> Report:
    """Predicted against measured."""
    return Report(
        plan=harness.plan,
        predicted=harness.expected,
        measured=harness.measured(),
        steps=len(harness.step_seconds),
        blocks=tuple(BlockRow(**row) for row in harness.plan.about.get("rows", ())),
        notes=tuple(harness.notes),
        environment=environment(),
    )


def environment() -> dict[str, Any]:
    """Versions and devices of a measurement."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found
