"""Plans for one model at other sizes of its batch, and tighter ones: what `holdall.fit` gives the harness to choose from.

All plans of a run place the model states alike, since moving them between two steps would take longer than the step. The
largest size that is known is planned first, so that the placement is made for it; the others are planned around that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from holdall import api
from holdall.actions.in_backward import InBackward
from holdall.caching import cache_folder, key_of
from holdall.errors import HoldallError, Infeasible, InvalidInput, Unsupported
from holdall.fitting.captured import correct_blocks
from holdall.fitting.correction import Correction, Corrector
from holdall.fitting.remembering import SLOW, keep_trace, remember_trace
from holdall.fitting.replan import plan_around
from holdall.problem import PROBLEM, bare_problem, hardware_for, make_problem, resolve_precision
from holdall.runtime.budget.meter import device_context
from holdall.runtime.switching.buckets import Axes, Bucket, Buckets, Call, Shapes, find_axes, first_that_goes, met, resize
from holdall.runtime.switching.recast import Prepared
from holdall.tracing.calls import Given
from holdall.tracing.identity import identity_of
from holdall.tracing.process_memory import besides_of
from holdall.tracing.step import default_loss
from holdall.types import Action, Plan, Progress, Trace
from holdall.types.plan import silent

log = logging.getLogger("holdall")

Lengths = str | Iterable[Any]
_OFF = 0.08  # a step that takes so much more or less than was said is worth another plan


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """One step at one size."""

    trace: Trace
    shapes: Shapes  # of what the model was called with
    given: Mapping[str, Given]  # what its blocks were called with

    @property
    def size(self) -> int:
        return sum(t.nbytes for t in self.trace.tensors.values())


class PlanBook:
    """`tracing`: what `holdall.trace` is to be given besides model and batch. `planning`: the same of `holdall.plan`.
    `adjust`: what becomes of every plan before it is used."""

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        *,
        tracing: Mapping[str, Any],
        planning: Mapping[str, Any],
        adjust: Callable[[Plan, Trace], Plan] = lambda plan, _: plan,
    ) -> None:
        self._model = model
        self._batch: Any = batch
        self._came_from: dict[int, torch.device] = {}
        self._is_needed = False  # the sample, after the first forward
        self._tracing = dict(tracing)
        self._planning = dict(planning)
        self._adjust = adjust
        self._call = Call(model)
        self._traces: dict[int, tuple[Plan, Trace]] = {}  # by plan; the plan itself, so that its id stays its own
        self._corrector: Corrector | None = None
        self._besides: dict[str, Any] = {}  # what the process holds besides, as it was before the harness came

    def sample(self, ready: Plan | None = None) -> tuple[Plan, Trace]:
        """The plan for the sample alone; `ready`: one that was made ahead, unless it is for another autocast."""
        traced = self._trace(self._batch)
        if ready is not None and ready.about.get("autocast") == traced.trace.about.get("autocast"):
            return self.know(ready, traced.trace), traced.trace
        made, trace = self._checked(traced, lambda trace: api.plan(trace, **self._planning))
        return self.know(made, trace), trace

    def _checked(self, traced: _Traced, make: Callable[[Trace], Plan]) -> tuple[Plan, Trace]:
        """A plan whose blocks, where they run op by op, were captured with the ops that it was made for."""
        trace = traced.trace
        made = make(trace)
        for _ in trace.blocks:
            corrected = self._captured(trace, traced.given, made)
            if corrected is None:
                break
            trace = corrected
            made = make(trace)
        return made, trace

    def _captured(self, trace: Trace, given: Mapping[str, Given], plan: Plan | None) -> Trace | None:
        """The trace as captures of its blocks correct it (of those that the plan runs op by op); None: nothing to correct."""
        dtype = resolve_precision(self._tracing.get("precision"))
        return correct_blocks(trace, plan, self._model, given, dtype)

    def know(self, plan: Plan, trace: Trace) -> Plan:
        """The plan was made for this trace; as it will be used."""
        made = self._adjust(plan, trace)
        self._traces[id(made)] = made, trace
        return made

    def buckets(self, lengths: Lengths) -> tuple[Plan, Buckets]:
        """(the sample's plan, all there are): one for each size of `lengths`; "auto": the others when they are met."""
        sample = self._trace(self._batch)
        if sample.trace.about.get("source") == "eager":
            raise Unsupported(
                "the step can only be watched as it runs: a plan for another size would take that size's memory first",
                hint="plan for the longest batch there is, without `lengths`",
            )
        axes = self._axes(needed=lengths == "auto" and self._tracing.get("loss") is not None)
        others = [self._trace(batch) for batch in self._batches(lengths, axes)]
        ordered = sorted([sample, *others], key=lambda t: -t.size)
        first = self._freely(ordered[0])
        found = {id(ordered[0]): first}
        for traced in ordered[1:]:
            found[id(traced)] = self._around(traced, first.plan)
        mine = found[id(sample)]
        self._is_needed = self._tracing.get("loss") is not None
        unique = {tuple(sorted(b.shapes.items())): b for b in (*found.values(), mine)}
        return mine.plan, Buckets(unique.values(), self._call, partial(self._meet, axes, first.plan))

    def tighten(self, plan: Plan) -> Plan | None:
        """The plan with the smallest peak for the same step and placement; None: this is it."""
        known = self._traces.get(id(plan))
        if known is None:
            return None
        home = next(iter(plan.budget))
        made = self._adjust(plan_around(self._problem(known[1]), _settled(plan), smallest=True), known[1])
        return made if made.predicted.peak[home] < plan.predicted.peak[home] else None

    def expect_corrections(self, plan: Plan, trace: Trace) -> None:
        """Lay out what a correction of this plan would need, now rather than in a step."""
        try:
            self._corrector = Corrector(plan, trace)
        except (OSError, HoldallError) as error:
            log.info("holdall: plans will not be corrected by what is measured: %s", error)

    def correct(self, harness: Any, seconds: float) -> Correction | None:
        """A plan that is made anew, beside the run, where a step takes another time than was said. None: it was near enough."""
        known, corrector = self._traces.get(id(harness.plan)), self._corrector
        if known is None or corrector is None or corrector.plan is not harness.plan:
            return None
        if abs(seconds / harness.expected.seconds - 1) <= _OFF:
            return None
        given = {k: v for k, v in self._planning.items() if k in PROBLEM}
        machine = hardware_for(known[1], given.pop("hardware", None), given.get("budget", "auto"))
        problem = bare_problem(known[1], machine, **given)
        rate = harness.engine.updater.rate if harness.engine is not None and harness.engine.updater is not None else None
        options = {k: v for k, v in self._planning.items() if k not in (*PROBLEM, "planner")}
        return corrector.ask(
            replace(problem, clipped=not harness.is_mostly_ahead),
            seconds=seconds,
            rate=rate,
            options=options,
            then=lambda plan: self.know(plan, known[1]),
        )

    def recast(self, prepare: Callable[[], Prepared], autocast: torch.dtype | None) -> Prepared:
        """All plans anew, by `prepare`, for a loop under another autocast than was traced."""
        self._tracing["autocast"] = autocast or False
        self._traces.clear()
        return prepare()

    def put_aside(self) -> None:
        """The first forward has come. The sample is needed again only for batches of other sizes where the loop has a loss of
        its own; then it waits in the host's memory."""
        if not self._is_needed:
            self._batch = None  # it would take its memory as long as the harness does
            return

        def copied(t: torch.Tensor) -> torch.Tensor:
            copy = t.detach().to("cpu", copy=True)
            self._came_from[id(copy)] = t.device
            return copy

        with _disable_current_modes():  # nobody's step: not counted
            self._batch = tree_map_only(torch.Tensor, copied, self._batch)

    # sizes

    def _axes(self, *, needed: bool) -> Axes | None:
        try:
            return find_axes(self._batch)
        except Unsupported:
            if needed:  # with a loss of the loop's own, a batch can only be made from the sample
                raise
            return None

    def _batches(self, lengths: Lengths, axes: Axes | None) -> list[Any]:
        if lengths == "auto":
            return []
        if isinstance(lengths, (str, Mapping, torch.Tensor)) or not isinstance(lengths, Iterable):
            raise InvalidInput(
                f"`lengths` is {lengths if isinstance(lengths, str) else type(lengths).__name__!r}",
                hint='use "auto", lengths such as [512, 2048], pairs (rows, length), or batches of the sizes to expect',
            )
        return [self._batch_of(item, axes) for item in lengths]

    def _batch_of(self, item: Any, axes: Axes | None) -> Any:
        pair = isinstance(item, tuple) and len(item) == 2 and all(isinstance(n, int) for n in item)
        if not pair and not isinstance(item, int):
            if not any(isinstance(t, torch.Tensor) for t in tree_leaves(item)):
                raise InvalidInput(f"`lengths` has {item!r}, which is no size and no batch", hint="use lengths or batches")
            return item
        rows, length = item if pair else (None, item)
        if min(rows or 1, length) < 1:
            raise InvalidInput(f"`lengths` has {item!r}", hint="lengths and rows are 1 or more")
        return resize(self._batch, axes or find_axes(self._batch), rows=rows, length=length)

    def _meet(self, axes: Axes | None, first: Plan, args: Any, kwargs: Any) -> Bucket:
        """A bucket for a call that none covers: its size rounded up, or, if that does not go, its own."""
        shapes = self._call.shapes(args, kwargs)
        makers: list[Callable[[], Bucket]] = [
            partial(self._bucket_at, shapes, first, size, args, kwargs) for size in met((args, kwargs), axes)
        ]
        try:
            return first_that_goes(makers)
        except Infeasible as error:
            if not _settled(first):
                raise
            hint = "give this length up front (`lengths=`), so that model states are placed for it"
            raise Infeasible(error.fact, hint=hint, smallest=error.smallest) from error

    def _bucket_at(
        self, shapes: Shapes, first: Plan, size: tuple[Axes, int, int | None] | None, args: Any, kwargs: Any
    ) -> Bucket:
        if self._tracing.get("loss") is None:
            call = (args, kwargs) if size is None else resize((args, kwargs), size[0], rows=size[1], length=size[2])
            traced = self._trace(call, loss=_loss_of_call)
        else:
            if size is None:
                raise Unsupported(
                    f"a batch of {list(shapes.values())} was met, and how to make one from the sample cannot be known",
                    hint="give batches of the sizes to expect: lengths=[batch, ...]",
                )
            sample = tree_map_only(torch.Tensor, lambda t: t.to(self._came_from.get(id(t), t.device)), self._batch)
            traced = self._trace(resize(sample, find_axes(sample), rows=size[1], length=size[2]))
        made = self._around(traced, first)
        if not made.covers(shapes):
            raise Unsupported(
                f"a batch of {list(shapes.values())} was met; made from the sample it would be {list(made.shapes.values())}",
                hint="give batches of the sizes to expect: lengths=[batch, ...]",
            )
        return made

    # plans

    def _trace(self, batch: Any, **other: Any) -> _Traced:
        shapes: Shapes = {}

        def see(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
            for name, shape in self._call.shapes(args, kwargs).items():
                before = shapes.get(name, shape)
                shapes[name] = tuple(map(max, before, shape)) if len(before) == len(shape) else shape  # called more than once

        options = {**self._tracing, **other}
        self._progress("tracing", 0, 0, "")
        identity = self._identity(batch, options)
        found = remember_trace(identity, batch)
        given: dict[str, Given] = {}
        if found is not None:
            traced = self._as_it_is_now(found[0], batch, options)
            shapes.update(found[1])
        else:
            began = time.perf_counter()
            handle = self._model.register_forward_pre_hook(see, prepend=True, with_kwargs=True)
            try:
                traced, given = api.trace_calls(self._model, batch, **options)
            finally:
                handle.remove()
            if identity is not None and time.perf_counter() - began >= SLOW:
                while (corrected := self._captured(traced, given, None)) is not None:  # what blocks were given is not kept
                    traced = corrected
                keep_trace(identity, batch, traced, shapes, context=_context(traced))
        self._besides = self._besides or {k: traced.about.get(k) for k in ("process", "besides")}
        return _Traced(trace=replace(traced, about={**traced.about, **self._besides}), shapes=shapes, given=given)

    def _identity(self, batch: Any, given: Mapping[str, Any]) -> str | None:
        """Of the step that would be traced; None: it cannot be told from others, or nothing is kept."""
        if cache_folder() is None:
            return None
        options = {k: v for k, v in given.items() if k != "optimizer"}
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        found = identity_of(self._model, batch, given.get("optimizer"), options)
        return key_of("trace", found, gpu) if found is not None else None

    def _as_it_is_now(self, trace: Trace, batch: Any, given: Mapping[str, Any]) -> Trace:
        besides = besides_of(self._model, given.get("optimizer"), batch, torch.device(str(trace.about["device"])))
        return replace(trace, about={**trace.about, **besides})

    @property
    def _progress(self) -> Progress:
        found: Progress = self._planning.get("progress", silent)
        return found

    def _freely(self, traced: _Traced) -> Bucket:
        return self._bucket(traced, lambda trace: api.plan(trace, **self._planning))

    def _around(self, traced: _Traced, first: Plan) -> Bucket:
        """A plan with the same placement of states as the first."""
        settled = _settled(first)
        if self._planning.get("planner", "auto") == "auto":
            return self._bucket(traced, lambda trace: plan_around(self._problem(trace), settled))
        made = self._freely(traced)
        if _settled(made.plan) != settled:
            raise Unsupported(
                f"for a batch of {list(traced.shapes.values())} `{first.planner}` would place model states in another way",
                hint='use planner="auto", which plans around one placement',
            )
        return made

    def _bucket(self, traced: _Traced, make: Callable[[Trace], Plan]) -> Bucket:
        try:
            return Bucket(shapes=traced.shapes, plan=self.know(*self._checked(traced, make)))
        except Infeasible as error:
            batch = ", ".join(str(list(shape)) for shape in traced.shapes.values())
            fact = f"for a batch of {batch}: {error.fact}"
            raise Infeasible(fact, hint=error.hint, smallest=error.smallest) from error

    def _problem(self, trace: Trace) -> Any:
        given = {k: v for k, v in self._planning.items() if k in PROBLEM}
        return make_problem(trace, **given)


def _context(trace: Trace) -> int:
    """What driver and kernels take of the device that ops were measured on."""
    if trace.about.get("timed") is None:
        return 0
    return device_context(torch.device("cuda", torch.cuda.current_device()))


def _settled(plan: Plan) -> tuple[Action, ...]:
    """What must stay as it is between steps: where states live and when they are updated."""
    kept = [a for a in plan.actions if a.settles_states]
    return tuple(replace(a, late=()) if isinstance(a, InBackward) else a for a in kept)


def _loss_of_call(model: torch.nn.Module, call: Any) -> torch.Tensor:
    args, kwargs = call
    return default_loss(lambda: model(*args, **kwargs), ())  # type: ignore[arg-type]
