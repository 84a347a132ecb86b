"""Plans for one model at several batch sizes, and tighter ones: `holdall.fit` passes them to the harness.

All plans of a run place the model states alike, since moving them between two steps would take longer than the step. The
largest known size is planned first, so that the placement suits it; the others are planned around that placement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from holdall import api
from holdall.caching import cache_folder, key_of
from holdall.errors import HoldallError, Infeasible, InvalidInput, Unsupported
from holdall.fitting.captured import correct_blocks, plan_captured
from holdall.fitting.correction import Correction, Corrector
from holdall.fitting.remembering import SLOW, keep_trace, remember_trace
from holdall.fitting.replan import leave_to_loop, plan_around, plan_within, settled_by
from holdall.pace import Pace, pace_of
from holdall.planning.finish import over_budget
from holdall.problem import PROBLEM, bare_problem, hardware_for, make_problem
from holdall.runtime.budget.meter import device_context
from holdall.runtime.switching.buckets import Axes, Bucket, Buckets, ModelCall, Shapes, find_axes, first_that_goes, met, resize
from holdall.runtime.switching.recast import Prepared
from holdall.tracing.calls import Given
from holdall.tracing.identity import identity_of
from holdall.tracing.process_memory import OtherMemory, other_memory
from holdall.tracing.step import default_loss
from holdall.types import Plan, Problem, Progress, Trace
from holdall.types.plan import silent
from holdall.units import format_bytes

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

log = logging.getLogger("holdall")

Lengths = str | Iterable[Any]
_OFF = 0.08  # relative error of the predicted step time that is worth a correction


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """A traced step of one batch size."""

    trace: Trace
    shapes: Shapes  # of the model's arguments
    given: Mapping[str, Given]  # arguments of its blocks

    @property
    def size(self) -> int:
        return sum(t.nbytes for t in self.trace.tensors.values())


class PlanBook:
    """`tracing`: arguments of `holdall.trace` besides model and batch. `planning`: those of `holdall.plan`. `adjust`: applied
    to every plan before it is used.
    """

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
        self._is_needed = False  # the sample is still needed after the first forward
        self._tracing = dict(tracing)
        self._planning = dict(planning)
        self._adjust = adjust
        self._call = ModelCall(model)
        self._traces: dict[int, tuple[Plan, Trace]] = {}  # by id of the plan; keeps the plan, so that its id stays unique
        self._corrector: Corrector | None = None
        self._other: OtherMemory | None = None  # the process's other memory, measured before the harness existed

    def sample(self, ready: Plan | None = None) -> tuple[Plan, Trace]:
        """The plan for the sample alone; `ready`: one that was made ahead, unless it is for another autocast."""
        traced = self._trace(self._batch)
        if ready is not None and (ready.about.autocast or None) == traced.trace.about.autocast:
            return self.know(self._within_budget(ready, traced.trace), traced.trace), traced.trace
        made, trace = self._checked(traced, lambda trace: api.plan(trace, **self._planning))
        return self.know(made, trace), trace

    def set_head(self, head: str | int) -> None:
        """How the vocabulary head is traced from now on, as in `holdall.trace`."""
        self._tracing["head"] = head

    def _within_budget(self, ready: Plan, trace: Trace) -> Plan:
        """A plan made ahead, held to the budget of this call; refused if it needs more."""
        problem = make_problem(trace, **{key: value for key, value in self._planning.items() if key in PROBLEM})
        for tier, missing in over_budget(problem, ready.predicted).items():
            limit = problem.limit(tier)
            raise InvalidInput(
                f"`plan` needs {format_bytes(limit + missing)} of {tier}, over the budget of {format_bytes(limit)}",
                hint="leave `plan` out, or make it for this budget: holdall.plan(trace, budget=...)",
            )
        return replace(ready, budget={tier: min(size, problem.limit(tier)) for tier, size in ready.budget.items()})

    def _checked(self, traced: _Traced, make: Callable[[Trace], Plan]) -> tuple[Plan, Trace]:
        """A plan whose op-by-op blocks were captured with the planned ops."""
        return plan_captured(traced.trace, make, lambda trace, made: self._captured(trace, traced.given, made))

    def _captured(self, trace: Trace, given: Mapping[str, Given], plan: Plan | None) -> Trace | None:
        """The trace corrected by captures of the plan's op-by-op blocks; None: nothing to correct."""
        return correct_blocks(trace, plan, self._model, given, self._tracing.get("precision"))

    def know(self, plan: Plan, trace: Trace) -> Plan:
        """Record that the plan was made for this trace; returns the plan as it will be used."""
        made = self._adjust(plan, trace)
        self._traces[id(made)] = made, trace
        return made

    def buckets(self, lengths: Lengths) -> tuple[Plan, Buckets]:
        """(the sample's plan, all plans): one for each size in `lengths`; "auto": others are made when they occur."""
        sample = self._trace(self._batch)
        if sample.trace.about.source == "eager":
            raise Unsupported(
                "this step can only be traced by running it, so a plan for another size would need that size's memory first",
                hint="call `fit` with the longest batch, without `lengths=`",
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

    def tighten(self, plan: Plan, held: int | None = None, /) -> Plan | None:
        """A plan for the same step with the same placement: the one with the smallest peak or, with `held`, one that leaves
        these bytes of the budget to the loop. None: there is none.
        """
        known = self._traces.get(id(plan))
        if known is None:
            return None
        trace, home = known[1], next(iter(plan.budget))
        if held is not None:
            less = plan_within(self._problem(trace), settled_by(plan), held, self._planning)
            made = leave_to_loop(self._adjust(less, trace), plan.budget, held)
            self._traces[id(made)] = made, trace
            return made
        made = self._adjust(plan_around(self._problem(trace), settled_by(plan), smallest=True), trace)
        return made if made.predicted.peak[home] < plan.predicted.peak[home] else None

    def expect_corrections(self, plan: Plan, trace: Trace) -> None:
        """Prepare for a correction of this plan now rather than in a step."""
        try:
            self._corrector = Corrector(plan, trace)
        except (OSError, HoldallError) as error:
            log.info("holdall: plans will not be corrected by measured times: %s", error)

    def correct(self, harness: Harness, seconds: float) -> Correction | None:
        """Start a correction of the plan in the background if the step time differs from the prediction. None: it is close
        enough.
        """
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
        """Make all plans again, by `prepare`, for a loop under another autocast than traced."""
        self._tracing["autocast"] = autocast or False
        self._traces.clear()
        return prepare()

    def put_aside(self) -> None:
        """The first forward has begun. The sample is needed again only for other batch sizes under a custom loss; then it is
        moved to the host.
        """
        if not self._is_needed:
            self._batch = None  # otherwise it would occupy memory as long as the harness
            return

        def copied(t: torch.Tensor) -> torch.Tensor:
            copy = t.detach().to("cpu", copy=True)
            self._came_from[id(copy)] = t.device
            return copy

        with _disable_current_modes():  # not counted in any step
            self._batch = tree_map_only(torch.Tensor, copied, self._batch)

    # sizes

    def _axes(self, *, needed: bool) -> Axes | None:
        try:
            return find_axes(self._batch)
        except Unsupported:
            if needed:  # with a custom loss, a batch can only be made from the sample
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
                raise InvalidInput(
                    f"`lengths` has {item!r}, which is neither a size nor a batch",
                    hint="use lengths such as [512, 2048], or batches",
                )
            return item
        rows, length = item if pair else (None, item)
        if min(rows or 1, length) < 1:
            raise InvalidInput(f"`lengths` has {item!r}", hint="lengths and rows are 1 or more")
        return resize(self._batch, axes or find_axes(self._batch), rows=rows, length=length)

    def _meet(self, axes: Axes | None, first: Plan, args: Any, kwargs: Any) -> Bucket:
        """A bucket for a call that none covers: of its size rounded up or, if that does not fit, of its own."""
        shapes = self._call.shapes(args, kwargs)
        makers: list[Callable[[], Bucket]] = [
            partial(self._bucket_at, shapes, first, size, args, kwargs) for size in met((args, kwargs), axes)
        ]
        try:
            return first_that_goes(makers)
        except Infeasible as error:
            if not settled_by(first):
                raise
            hint = "name this length up front, as in fit(..., lengths=[512, 2048]), so that model states are placed for it"
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
                    f"a batch of {list(shapes.values())} was met, and it is unclear how to make one from the sample",
                    hint="pass sample batches: fit(..., lengths=[short_batch, long_batch])",
                )
            sample = tree_map_only(torch.Tensor, lambda t: t.to(self._came_from.get(id(t), t.device)), self._batch)
            traced = self._trace(resize(sample, find_axes(sample), rows=size[1], length=size[2]))
        made = self._around(traced, first)
        if not made.covers(shapes):
            raise Unsupported(
                f"a batch of {list(shapes.values())} was met; made from the sample it would be {list(made.shapes.values())}",
                hint="pass sample batches: fit(..., lengths=[short_batch, long_batch])",
            )
        return made

    # plans

    def _trace(self, batch: Any, **other: Any) -> _Traced:
        shapes: Shapes = {}

        def see(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
            for name, shape in self._call.shapes(args, kwargs).items():
                before = shapes.get(name, shape)
                shapes[name] = tuple(map(max, before, shape)) if len(before) == len(shape) else shape  # called several times

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
            if identity is not None and time.perf_counter() - began >= SLOW and not self._pace.is_busy:
                while (corrected := self._captured(traced, given, None)) is not None:  # the arguments of blocks are not cached
                    traced = corrected
                keep_trace(identity, batch, traced, shapes, context=_context(traced))
        self._other = self._other or OtherMemory(process=traced.about.process, besides=traced.about.besides)
        return _Traced(trace=_beside(traced, self._other), shapes=shapes, given=given)

    def _identity(self, batch: Any, given: Mapping[str, Any]) -> str | None:
        """The cache key of the step; None: it cannot be identified, or the cache is off."""
        if cache_folder() is None:
            return None
        options = {k: v for k, v in given.items() if k != "optimizer"}
        gpu = (torch.cuda.get_device_name(), self._pace.since) if torch.cuda.is_available() else None
        found = identity_of(self._model, batch, given.get("optimizer"), options)
        return key_of("trace", found, gpu) if found is not None else None

    @property
    def _pace(self) -> Pace:
        return pace_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def _as_it_is_now(self, trace: Trace, batch: Any, given: Mapping[str, Any]) -> Trace:
        return _beside(trace, other_memory(self._model, given.get("optimizer"), batch, torch.device(trace.about.device)))

    @property
    def _progress(self) -> Progress:
        found: Progress = self._planning.get("progress", silent)
        return found

    def _freely(self, traced: _Traced) -> Bucket:
        return self._bucket(traced, lambda trace: api.plan(trace, **self._planning))

    def _around(self, traced: _Traced, first: Plan) -> Bucket:
        """A plan with the same placement of states as the first."""
        settled = settled_by(first)
        if self._planning.get("planner", "auto") == "auto":
            return self._bucket(traced, lambda trace: plan_around(self._problem(trace), settled))
        made = self._freely(traced)
        if settled_by(made.plan) != settled:
            raise Unsupported(
                f"for a batch of {list(traced.shapes.values())} `{first.planner}` would place model states differently",
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

    def _problem(self, trace: Trace) -> Problem:
        given = {k: v for k, v in self._planning.items() if k in PROBLEM}
        return make_problem(trace, **given)


def _beside(trace: Trace, other: OtherMemory) -> Trace:
    return replace(trace, about=replace(trace.about, process=other.process, besides=other.besides))


def _context(trace: Trace) -> int:
    """Bytes of driver and kernels on the device that ops were measured on."""
    if trace.about.timed is None:
        return 0
    return device_context(torch.device("cuda", torch.cuda.current_device()))


def _loss_of_call(model: torch.nn.Module, call: Any) -> torch.Tensor:
    args, kwargs = call
    return default_loss(lambda: model(*args, **kwargs), ())  # type: ignore[arg-type]
