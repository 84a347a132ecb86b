"""The four verbs, trace -> plan -> apply -> report, and `fit`, which does the first three."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from holdall.actions.head import sum_in_place
from holdall.errors import Infeasible
from holdall.fitting.applying import check_belongs, is_over_ranks, stores_for
from holdall.fitting.head import choose_head
from holdall.fitting.mesh import Ranks, trace_on_mesh
from holdall.narrow.counting import told
from holdall.narrow.kernels import traced_for
from holdall.parallel.agree import agree
from holdall.precision import plannable, put_on
from holdall.problem import Budget, Precision, make_problem, resolve_optimizer, resolve_precision, resolve_recipe
from holdall.registry import build_member
from holdall.reporting import Report
from holdall.reporting.progress import terminal_line
from holdall.runtime.budget.slow_tiers import slow_tiers
from holdall.runtime.harness import Harness
from holdall.runtime.head.lazy_logits import chunk_head
from holdall.runtime.programs.compiled import resolve_backend
from holdall.runtime.switching.buckets import Buckets
from holdall.runtime.switching.recast import Recast
from holdall.runtime.switching.replacements import Tighten
from holdall.runtime.switching.trials import Correct
from holdall.tiers import Store
from holdall.tracing import check_model, trace_step
from holdall.tracing.autocast import Autocast
from holdall.tracing.calls import Given
from holdall.types import ChunkedHead, Hardware, Mesh, Plan, Planner, Progress, Trace
from holdall.types.plan import silent
from holdall.updates.planned import refuse_planned


def trace(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | str | None = None,
    loss: Any = None,
    device: str | torch.device | None = None,
    precision: Precision = None,
    autocast: Autocast = None,
    head: str | int = "auto",
    mesh: Ranks = None,
    shard: str = "fsdp",
) -> Trace:
    """Record one training step of a model on fake tensors, without needing its memory.

    `batch` is what the loop passes to the model: a mapping (`model(**batch)`), a tuple (`model(*batch)`) or one tensor.
    `optimizer`: the loop's, or the name of one, such as "adamw" or "galore:rank=64" (`holdall optimizers` lists them).
    `loss`: a function `(model, batch) -> scalar` where the model does not return `.loss`. `device`: trace as for this device
    ("cuda" works on a machine without one); by default where the model lies, or the CPU for a model on the meta device.
    `precision`: a recipe, one of `holdall precisions`; "bf16" computes with bf16 working copies of the float32 parameters, and
    the optimizer updates the parameters themselves. `autocast`: the dtype of the loop's own `torch.autocast` around forward and
    loss ("bf16", "fp16", a dtype, True for the device's default, False for none); None: that of the context in which this is
    called. `head`: the vocabulary head, "whole", so many rows at a time, or by its size ("auto"). `mesh`: ranks over which the
    model will be sharded, such as {"dp": 64}, by the way `shard` ("fsdp", "zero3", "zero2", "zero1" or "ddp"): the step of one
    of them is traced, with its collectives. No other rank is needed. {"replicate": 8, "dp": 8} repeats shards (also "nig"
    and other triples of PaRO), {"nodes": 8, "dp": 8} gathers them in two stages ("hpz", "qwz", "qgz", "zero++", "horing").
    {"tp": 8} divides linear layers ("tensor"; "sequence": activations between them too), {"cp": 8} the sequence ("ulysses",
    "ring", "zigzag", "balanced", "queries"), {"ep": 8} experts. {"dp": 8, "tp": 8} does both, also with "cp" or "ep": `shard`
    then names one way or two, "zero2+sequence".
    """
    if mesh is not None:
        return trace_on_mesh(model, batch, Mesh.of(mesh), shard, optimizer, loss, device, precision, autocast, head)
    given: dict[str, Any] = {"loss": loss, "device": device, "precision": precision, "autocast": autocast, "head": head}
    return trace_calls(model, batch, optimizer=optimizer, **given)[0]


def trace_calls(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | str | None = None,
    loss: Any = None,
    device: str | torch.device | None = None,
    precision: Precision = None,
    autocast: Autocast = None,
    head: str | int = "auto",
) -> tuple[Trace, dict[str, Given]]:
    """`trace`, and what each block was called with."""
    recipe, dtype = resolve_recipe(precision), resolve_precision(precision)
    if recipe is not None:
        undo = put_on(recipe, model, to_trace=True)
        try:
            plainly: dict[str, Any] = {"loss": loss, "device": device, "autocast": autocast, "head": head}
            with traced_for(device):
                traced, given = trace_calls(model, batch, optimizer=optimizer, precision=dtype, **plainly)
        finally:
            undo()
        return replace(traced, about=replace(traced.about, recipe=str(recipe))), given
    chunked = choose_head(model, batch, head)
    given = {}
    rule = resolve_optimizer(optimizer, model)
    record = partial(trace_step, optimizer=rule, loss=loss, device=device, precision=dtype, autocast=autocast, given=given)
    if chunked is None:
        return record(model, batch), given
    path, rows = chunked
    undo = chunk_head(model.get_submodule(path), rows=rows)
    try:
        traced = record(model, batch)
    finally:
        undo()
    if traced.about.device == "cuda":
        traced = sum_in_place(traced)
    return replace(traced, about=replace(traced.about, head=ChunkedHead(module=path, rows=rows))), given


def plan(
    trace: Trace | str | Path,
    *,
    budget: Budget = "auto",
    planner: str = "auto",
    hardware: Hardware | str | Path | None = None,
    allow: Iterable[str] | None = None,
    reads_gradients: bool = True,
    accumulate: int = 1,
    layout: str | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Plan:
    """Choose actions so that a step fits `budget`; raises `Infeasible` if no plan does.

    `budget`: bytes of the accelerator's memory as a number, "24GiB", a fraction of the device, "auto" (all of it), or one value
    per tier (`{"gpu": "24GiB", "cpu": "64GiB"}`). `hardware`: a `Hardware`, the path of one, the name of a GPU, or None to
    probe this machine. `allow`: names of the actions that may be used. `reads_gradients`: whether the loop reads or changes
    gradients between backward and step; if not, parameters may be updated in backward. `accumulate`: backwards per step.
    `layout`: give the step's tensors planned offsets in one arena, found by a static layout such as "best_fit"
    (`holdall layout`); None, or if nothing fits with it: torch's allocator decides where they lie. `options` go to the planner.
    """
    from holdall.fitting.remembering import remember_plan

    reads_gradients = options.pop("clips", reads_gradients)  # its older name
    chosen: Planner = build_member("planners", planner, options, f"planner {planner}")
    read = Trace.load(trace) if isinstance(trace, (str, Path)) else trace
    problem = make_problem(
        read,
        budget=budget,
        hardware=hardware,
        allow=allow,
        reads_gradients=reads_gradients,
        accumulate=accumulate,
        layout=layout,
        progress=progress,
    )

    def make() -> Plan:
        try:
            return chosen(problem)
        except Infeasible:
            if not layout:
                raise
            with suppress(Infeasible):  # an arena is kept between its uses, which torch's memory is not
                made = chosen(replace(problem, layout=""))
                return replace(made, why=(*made.why, f"with the arena of layout `{layout}` nothing fits: left out"))
            raise

    with _no_collection():
        return remember_plan(problem, chosen, make)


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
    if is_over_ranks(read, model):
        agree(read, model)
    backend = resolve_backend(compile)
    check_model(model)
    refuse_planned(model)

    def make_stores(plan: Plan) -> list[Store]:
        return stores_for(plan, model)

    recipe = read.about.recipe
    with ExitStack() as stack:
        if recipe:
            stack.callback(put_on(plannable(recipe), model))
        check_belongs(read, model, optimizer)
        harness = Harness(
            read,
            model,
            optimizer,
            stores=make_stores(read),
            enforce=enforce,
            make_report=make_report,
            make_stores=make_stores,
            fallbacks=fallbacks,
            correct=correct,
            buckets=buckets,
            tighten=tighten,
            recast=recast,
            record=record,
            backend=backend,
            progress=progress,
        )
        kept = stack.pop_all()
        if not is_over_ranks(read, model):  # a model stays sharded when the harness is closed, and in its precision
            harness.at_close(kept.close)
    return harness


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
    optimizer: torch.optim.Optimizer | str | None,
    batch: Any,
    *,
    budget: Budget = "auto",
    planner: str = "auto",
    loss: Any = None,
    hardware: Hardware | str | Path | None = None,
    allow: Iterable[str] | None = None,
    device: str | torch.device | None = None,
    precision: Precision = None,
    autocast: Autocast = None,
    head: str | int = "auto",
    reads_gradients: bool = True,
    accumulate: int = 1,
    layout: str | None = None,
    enforce: bool = True,
    lengths: str | Iterable[Any] | None = None,
    repeat: bool = True,
    record: str | Path | None = None,
    compile: bool | str = False,  # noqa: A002
    plan: Plan | str | Path | None = None,
    mesh: Ranks | str = None,
    shard: str = "fsdp",
    progress: Progress | None = None,
    **options: Any,
) -> Harness:
    """Trace, plan and apply in one call. Returns the harness, switched on; `close()` or a `with` block removes it.

    `optimizer`: the loop's, or the name of one, such as "adamw" or "galore:rank=64": then `harness.optimizer` is it. A model on
    the CPU whose batch is on the GPU trains on the GPU: the plan decides which parts go there. `lengths`:
    batches of other sizes to expect, as lengths, as pairs (rows, length) or as batches; "auto": plans are made when they are
    met. `autocast`: see `trace`; where the loop's first forward comes under another, the step is traced and planned again
    before that forward runs. `repeat`: a step that runs out of memory is made again under a tighter plan. `record`: a folder
    for what was in memory.
    `layout`: see `plan`.
    `plan`: one that was made ahead for this step and budget, to begin with; fallbacks, corrections and repeats are as without.
    `compile`: see `apply`; plans are then not corrected by the times that are measured, which are not of the planned kernels.
    `mesh`: shard the model over the ranks of this run, such as {"dp": 2} or "auto" (all of them), by the way `shard` (see
    `trace`; "auto": the fastest that fits); every rank calls this with the same model and its own batch, or the same batch over
    {"tp": 2} and {"cp": 2}; over {"dp": 2, "tp": 2} neighbours have the same. Activations are recomputed and offloaded as the
    budget asks. The model stays sharded when the harness is closed.
    `progress`: hears what is being done; None: a line on the terminal, if there is one. What is measured, traced and planned is
    kept on disk for the next time (`holdall cache`).
    """
    from holdall.fitting.request import FitRequest
    from holdall.fitting.start import start

    reads_gradients = options.pop("clips", reads_gradients)  # its older name
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
        reads_gradients=reads_gradients,
        accumulate=accumulate,
        layout=layout,
        enforce=enforce,
        lengths=lengths,
        repeat=repeat,
        record=record,
        compile=compile,
        plan=plan,
        mesh=mesh,
        shard=shard,
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
        blocks=harness.plan.about.rows,
        notes=(*harness.notes, *slow_tiers(harness.plan, harness.stores), *told(harness.model)),
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
