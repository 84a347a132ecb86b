"""The four verbs, trace -> plan -> apply -> report, and `fit`, which is the first three."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from holdall.cost.roofline import cost_trace
from holdall.errors import HoldallError, InvalidInput, TraceMismatch, Unsupported, unknown_name
from holdall.machine.presets import gpu
from holdall.machine.probe import probed
from holdall.registry import build_member, member_class, member_names
from holdall.reporting import BlockRow, Report
from holdall.reporting.progress import terminal_line
from holdall.runtime.budget.meter import device_context
from holdall.runtime.harness import Harness, refuse_planned
from holdall.runtime.head.lazy_logits import chunk_head, head_of, rows_for
from holdall.runtime.programs.compiled import resolve_backend
from holdall.runtime.switching.buckets import Buckets
from holdall.runtime.switching.recast import Prepared, Recast
from holdall.runtime.switching.retry import Tighten
from holdall.runtime.switching.trials import Correct
from holdall.tracing import check_model, model_signature, target_device, trace_step
from holdall.tracing.autocast import Autocast, resolve_autocast
from holdall.tracing.calls import Given
from holdall.types import Hardware, Plan, Problem, Progress, Trace
from holdall.types.plan import silent
from holdall.units import GiB, parse_bytes

Budget = str | int | float | Mapping[str, str | int | float]

_ALLOWED = ("keep", "recompute", "offload", "place", "head")


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
    """Write down what one training step does, without needing the memory.

    `batch` is what the loop passes to the model: a mapping (`model(**batch)`), a tuple (`model(*batch)`) or one tensor.
    `loss`: a function `(model, batch) -> scalar` where the model does not return `.loss`. `device`: trace as for this device
    ("cuda" works on a machine without one); by default where the model lies, or the CPU for a model on the meta device.
    `precision`: "bf16" computes with copies of the float32 parameters in that width, while the optimizer updates the parameters
    themselves. `autocast`: the dtype of the loop's `torch.autocast` around forward and loss ("bf16", "fp16", a dtype, True for
    the device's default, False for none); None: that of the context in which this is called. `head`: the vocabulary head,
    "whole", so many rows at a time, or by its size ("auto").
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
    """`trace`, and what each block was called with."""
    dtype = resolve_precision(precision)
    chunked = _choose_head(model, batch, head)
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
    """Decide what to do about a step so that it fits `budget`; raises `Infeasible` if nothing does.

    `budget`: bytes of the accelerator's memory as a number, "24GiB", a fraction of the device, "auto" (all of it), or one
    value per tier (`{"gpu": "24GiB", "cpu": "64GiB"}`). `hardware`: a `Hardware`, the path of one, the name of a GPU, or None
    to probe this machine. `allow`: actions that may be used. `clips`: whether the loop looks at gradients between backward
    and step; if not, parameters may be updated as their gradients come. `accumulate`: backwards per step. `options` go to the
    planner.
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
    """A planner makes millions of small objects and no cycles: looking for some takes a quarter of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


PROBLEM = ("budget", "hardware", "allow", "clips", "accumulate", "progress")


def make_problem(
    trace: Trace,
    *,
    budget: Budget = "auto",
    hardware: Hardware | str | Path | None = None,
    allow: Iterable[str] | None = None,
    clips: bool = True,
    accumulate: int = 1,
    progress: Progress = silent,
) -> Problem:
    """What a planner is given; see `plan`."""
    progress("looking at this machine", 0, 0, "")
    machine = hardware_for(trace, hardware)
    progress("planning", 0, 0, "")
    given: dict[str, Any] = {"allow": allow, "clips": clips, "accumulate": accumulate, "progress": progress}
    return bare_problem(cost_trace(trace, machine), machine, budget=budget, **given)


def bare_problem(
    trace: Trace,
    hardware: Hardware,
    *,
    budget: Budget = "auto",
    allow: Iterable[str] | None = None,
    clips: bool = True,
    accumulate: int = 1,
    progress: Progress = silent,
) -> Problem:
    """The same with the trace as it is: for whoever has costed it, or will."""
    return Problem(
        trace=trace,
        hardware=hardware,
        budget=resolve_budget(budget, hardware),
        allow=resolve_allow(allow),
        clips=clips,
        accumulate=accumulate,
        progress=progress,
    )


def hardware_for(trace: Trace, hardware: Hardware | str | Path | None) -> Hardware:
    """The machine for a trace: with what its kernels came to take where its ops were measured, since they will again."""
    machine = resolve_hardware(hardware, str(trace.about.get("device", "cpu")))
    if trace.about.get("timed") != machine.name:
        return machine
    return replace(machine, context=max(machine.context, int(trace.about.get("context") or 0)))


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
    """Install a plan on a model. The training loop stays as it is; leaving the harness restores the model.

    `enforce`: stop the run at the op that would pass the budget. `fallbacks`: plans to step back to if this one is measured
    slower. `correct`: makes another from what was measured. `buckets`: plans for steps of other sizes. `tighten`: gives
    a tighter plan, under which a step that ran out of memory is repeated. `recast`: makes the plans anew where the first
    forward comes under another autocast than was traced. `record`: a folder for what was in memory when it ran
    out. `fit` makes these. `compile`: blocks that are planned op by op run as fused kernels, by "inductor" (True) or another
    back end of `torch.compile`; sums are then added in another order.
    """
    read = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    backend = resolve_backend(compile)
    check_model(model)
    refuse_planned(model)
    _check_belongs(read, model, optimizer)

    def make_store(plan: Plan) -> Any:
        return _store_for(plan, model)

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
    """With a line on the terminal, if there is one and nobody has said how progress is to be shown."""

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
    """Trace, plan and apply in one call. The harness is on when this returns; `close()` or a `with` block takes it off.

    A model on the CPU whose batch is on the GPU trains on the GPU: what of it goes there is the plan's business. `lengths`:
    batches of other sizes to expect, as lengths, as pairs (rows, length) or as batches; "auto": plans are made when they are
    met. `autocast`: see `trace`; where the loop's first forward comes under another, the step is traced and planned again
    before that forward runs. `repeat`: a step that runs out of memory is made again under a tighter plan. `record`: a folder
    for what was in memory.
    `compile`: see `apply`; plans are then not corrected by the times that are measured, which are not of the planned kernels.
    `progress`: hears what is being done; None: a line on the terminal, if there is one. What is measured, traced and planned is
    kept on disk for the next time (`holdall cache`).
    """
    from holdall.fitting.arguments import check_arguments
    from holdall.fitting.plan_book import Sizes

    given = {"budget": budget, "planner": planner, "loss": loss, "hardware": hardware, "allow": allow, "precision": precision}
    given |= {"head": head, "clips": clips, "accumulate": accumulate, "enforce": enforce, "lengths": lengths, "repeat": repeat}
    check_arguments(model, optimizer, batch, given, options)
    refuse_planned(model)
    resolve_backend(compile)  # before anything slow
    told = progress or silent
    on = device if device is not None else _device_of_batch(batch)
    asked = {"budget": budget, "hardware": hardware, "allow": allow, "accumulate": accumulate}
    cast = resolve_autocast(autocast, target_device(model, on).type) or False
    sizes = Sizes(
        model,
        batch,
        tracing={"optimizer": optimizer, "loss": loss, "device": on, "precision": precision, "autocast": cast, "head": head},
        planning={**asked, "planner": planner, "clips": clips, "progress": told, **options},
        adjust=partial(to_be_compiled, {**asked, "clips": clips}) if compile else lambda plan, _: plan,
    )

    def prepare() -> Prepared:
        if lengths is not None:
            made, buckets = sizes.buckets(lengths)
            return Prepared(plan=made, buckets=buckets)
        made, traced = sizes.sample()
        fallbacks = () if compile else tuple(sizes.know(f, traced) for f in _fallbacks_for(made, traced, **asked))
        is_corrected = traced.about.get("device") == "cuda" and made.planner == "auto" and not compile
        if is_corrected:
            sizes.expect_corrections(made, traced)
        return Prepared(plan=made, fallbacks=fallbacks, correct=sizes.correct if is_corrected else None)

    made = prepare()
    return apply(
        made.plan,
        model,
        optimizer,
        enforce=enforce,
        fallbacks=made.fallbacks,
        correct=made.correct,
        buckets=made.buckets,
        tighten=sizes.tighten if repeat else None,
        recast=Recast(make=partial(sizes.recast, prepare), forget=sizes.put_aside),
        record=record,
        compile=compile,
        progress=told,
    )


def to_be_compiled(given: Mapping[str, Any], plan: Plan, trace: Trace) -> Plan:
    """Every block that can be is run by a program: those that are kept too, or compiled ones would stand beside eager ones."""
    from holdall.planning.to_programs import by_programs

    return by_programs(make_problem(trace, **given), plan)


_SIMPLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chen", {"variant": "all", "last": True}),  # gradient checkpointing as everyone knows it
    ("zero_offload", {"overlap": True}),
)


def _fallbacks_for(made: Plan, traced: Trace, **given: Any) -> Iterator[Plan]:
    """What anyone would do, where it fits: every block recomputed, with the optimizer on the device or on the host."""
    if made.planner != "auto" or traced.about.get("device") != "cuda" or not made.actions:
        return  # times mean nothing, or nothing is done
    for planner, options in _SIMPLE:
        with suppress(HoldallError):
            yield plan(traced, planner=planner, **options, **given)


def make_report(harness: Harness) -> Report:
    """What was said against what happened."""
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
    """Versions and devices that a figure was obtained with."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


@lru_cache(maxsize=4)
def _probed(device: str) -> Hardware:
    return probed(device)


def resolve_hardware(hardware: Hardware | str | Path | None, device: str) -> Hardware:
    """The machine to plan for: given, read, named, or probed."""
    if isinstance(hardware, Hardware):
        return _as_it_is_now(hardware)
    if hardware is None:
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidInput(
                "the trace is for a GPU, and this machine has none to probe",
                hint='name the GPU to plan for: hardware="rtx-4090"',
            )
        return _as_it_is_now(_probed(device))
    text = str(hardware)
    if isinstance(hardware, Path) or text.endswith(".json"):
        return _as_it_is_now(Hardware.load(hardware))
    return gpu(text)


def _as_it_is_now(hardware: Hardware) -> Hardware:
    """With what kernels have come to take on this process's GPU, if that is the one: they are loaded when first used."""
    is_here = hardware.device == "cuda" and torch.cuda.is_available() and torch.cuda.is_initialized()
    if not is_here or hardware.name != torch.cuda.get_device_name():
        return hardware
    now = device_context(torch.device("cuda", torch.cuda.current_device()))
    return replace(hardware, context=max(hardware.context, now))


def resolve_budget(budget: Budget, hardware: Hardware) -> dict[str, int]:
    """Bytes per tier. One value is for the accelerator's own memory."""
    names = [tier.name for tier in hardware.tiers]
    given = budget if isinstance(budget, Mapping) else {hardware.home.name: budget}
    resolved = {}
    for tier, value in given.items():
        if tier not in names:
            raise unknown_name("tier", str(tier), names)
        capacity = hardware.tier(tier).capacity
        resolved[tier] = capacity if value == "auto" else parse_bytes(value, total=capacity)
    return {name: resolved.get(name, hardware.tier(name).capacity) for name in names}


def resolve_allow(allow: Iterable[str] | None) -> frozenset[str]:
    """Names of the actions that may be used."""
    if allow is None:
        return frozenset(_ALLOWED)
    names = [allow] if isinstance(allow, str) else list(allow)
    known = member_names("actions")
    for name in names:
        if name not in known:
            raise unknown_name("action", name, known)
    return frozenset({"keep", *names})


_PRECISIONS = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


def resolve_precision(precision: str | torch.dtype | None) -> torch.dtype | None:
    """The width to compute in; None: that of the parameters. Whoever gives a dtype knows what it needs."""
    if precision is None or isinstance(precision, torch.dtype):
        return precision
    if precision in ("fp32", "float32"):
        return None
    if precision in ("fp16", "float16"):
        raise Unsupported(
            "fp16 needs its loss scaled, which a plan does not do: small gradients would become zero",
            hint='use precision="bf16"; or torch.float16 if the loop scales the loss; or `holdall.precision.prepare("O2")`',
        )
    if precision not in _PRECISIONS:
        raise unknown_name("precision", precision, ("fp32", "bf16"))
    return _PRECISIONS[precision]


_BIG_LOGITS = GiB  # bytes of logits in float32 from which on they are not made whole


def _choose_head(model: torch.nn.Module, batch: Any, head: str | int) -> tuple[str, int] | None:
    """(path of the vocabulary head, rows at a time); None: it stays whole."""
    if isinstance(head, str) and head not in ("auto", "whole"):
        raise unknown_name("head", head, ("auto", "whole"))
    found = head_of(model) if isinstance(model, torch.nn.Module) and head != "whole" else None
    if found is None:
        if isinstance(head, int):
            raise Unsupported("the model has no vocabulary head to take in rows", hint='use head="whole"')
        return None
    path, module = found
    if isinstance(head, int):
        return path, head
    tokens, vocabulary = _rows_of_logits(batch), int(module.get_parameter("weight").shape[0])
    return (path, rows_for(tokens, vocabulary)) if tokens * vocabulary * 4 >= _BIG_LOGITS else None


def _rows_of_logits(batch: Any) -> int:
    """How many there will be: one for every label; of a batch without labels, for every entry of its largest table."""
    leaves, _ = tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
    tables = {keystr(path): t.numel() for path, t in leaves if isinstance(t, torch.Tensor) and t.dim() == 2}
    labels = [numel for name, numel in tables.items() if name.endswith("['labels']")]
    return max(labels or tables.values(), default=0)


def _device_of_batch(batch: Any) -> torch.device | None:
    """Where the batch lies, if that is a GPU."""
    devices = {t.device for t in tree_leaves(batch) if isinstance(t, torch.Tensor)}
    return next((d for d in devices if d.type == "cuda"), None)


def _check_belongs(plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if plan.signature and plan.signature != model_signature(model):
        raise TraceMismatch(
            f"the plan was made for another model ({plan.about.get('model')}) than this {type(model).__name__}: "
            "parameter names, shapes or dtypes differ",
            hint="trace and plan this model",
        )
    if optimizer is not None:
        own = {id(p) for p in model.parameters()}
        if any(id(p) not in own for g in optimizer.param_groups for p in g["params"]):
            raise InvalidInput(
                "the optimizer holds parameters that are not the model's",
                hint="build the optimizer over this model's parameters, after it was moved or wrapped",
            )
    device = next((p.device.type for p in model.parameters()), "cpu")
    planned = plan.about.get("device")
    moves = any(action.name == "place" for action in plan.actions) and device == "cpu"
    if planned and device not in (planned, "meta") and not moves:
        raise TraceMismatch(
            f"the plan is for {planned}, but the model lies on {device}",
            hint=f'move the model, or trace with device="{device}"',
        )


def _store_for(plan: Plan, model: torch.nn.Module) -> Any:
    """The far tier of the plan, if any action uses one."""
    tiers = list(plan.budget)
    uses = any(action.name in ("offload", "place") or getattr(action, "swap", False) for action in plan.actions)
    if len(tiers) < 2 or not uses:
        return None
    if tiers[1] not in member_names("tiers"):
        raise Unsupported(f"there is no tier `{tiers[1]}`", hint="plan again with this version")
    device = torch.device(str(plan.about.get("device") or next(model.parameters()).device.type))
    left = plan.budget[tiers[1]] - int(plan.about.get("process") or 0)
    return member_class("tiers", tiers[1])(capacity=left, device=device)
