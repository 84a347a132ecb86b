"""The model with a plan installed. Closing the harness restores the model.

The harness replaces the forward of the modules that the plan names, counts bytes, times steps, and checks that the loop still
does what was traced. It knows no action by name: actions fill in policies when they are installed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from holdall.casts import cast_inputs
from holdall.decoding import caching_configs, train_without_cache
from holdall.errors import Unsupported
from holdall.runtime.activations.offload import Bank
from holdall.runtime.activations.policy import Blocks, Policy, at_backward
from holdall.runtime.arena.step_arena import StepArena
from holdall.runtime.assembly import find_resident, find_there, lie_close, make_engine, make_gauge, make_meter, use_arena
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.budget.oom_report import FlightRecorder
from holdall.runtime.budget.results import Results, expect
from holdall.runtime.cleanup import leave_with, refuse_closed
from holdall.runtime.notes import Notes
from holdall.runtime.patching import put_method
from holdall.runtime.programs.compiled import Compiler
from holdall.runtime.states.engine import Engine
from holdall.runtime.states.model_copies import copy_plainly
from holdall.runtime.states.placement import Placing, device_of
from holdall.runtime.states.weights.cache import Lender
from holdall.runtime.states.whole_model import bring
from holdall.runtime.switching.backward_hook import watch_backward
from holdall.runtime.switching.buckets import Buckets
from holdall.runtime.switching.drift import Watch, refuse_compiled
from holdall.runtime.switching.recast import Casting, Prepared, Recast
from holdall.runtime.switching.replacements import Tighten
from holdall.runtime.switching.retry import Repeat
from holdall.runtime.switching.selector import Choosing
from holdall.runtime.switching.snapshot import RandomNumbers
from holdall.runtime.switching.submodule_calls import Parts
from holdall.runtime.switching.trials import Correct, PlanTrials
from holdall.tiers import Keeper, Store, Stores
from holdall.types import Outcome, Plan, Progress
from holdall.types.plan import silent
from holdall.updates.planned import PLANNED

__all__ = ["Harness", "Placing"]

log = logging.getLogger("holdall")


class Harness:
    """A context manager around the user's training loop; also usable without `with`, by calling `close()` at the end."""

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        stores: Iterable[Store] = (),
        enforce: bool = True,
        make_report: Callable[[Harness], Any] | None = None,
        make_stores: Callable[[Plan], list[Store]] | None = None,
        fallbacks: Sequence[Plan] = (),
        correct: Correct | None = None,
        buckets: Buckets | None = None,
        tighten: Tighten | None = None,
        recast: Recast | None = None,
        record: str | Path | None = None,
        backend: str | None = None,
        progress: Progress = silent,
    ) -> None:
        self.plan = self.regular = plan  # the active plan; the plan for steps of the sample's size
        self.model = model
        self.optimizer = optimizer
        self.stores = Stores(stores, plan.budget)
        self.notes: list[str] = []
        self.compiler = Compiler(backend, self.note()) if backend is not None else None
        self.engine: Engine | None = None
        self.updates: Any = None  # what updates in backward; its `.norm` is for loops that log it
        self._make_report = make_report
        self._progress = progress
        self._policies: dict[str, Policy] = {}
        self._placing: Placing | None = None
        self._undo: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []
        self.contexts: list[AbstractContextManager[object]] = []
        self.arena: StepArena | None = None  # where the tensors of steps lie; None: the plan has no layout
        self._is_stepping = False
        self._outside = 0  # host memory of model states outside the store
        self.were_ahead: list[bool] = []  # per step: the speculative updates were right
        self.device = device_of(model, plan)  # where the model computes
        self._home = next(iter(plan.budget), "cpu")
        self._meter = make_meter(self.device, plan, self._there)
        self._results = Results(self._meter)
        self._enforce = enforce
        self._closed = False
        self._make_stores = make_stores
        self._next: Plan | None = None  # a plan to change to before the next step
        recorder = FlightRecorder(record)
        self._repeat = Repeat(self, tighten, recorder, self._meter) if tighten is not None or record is not None else None
        self._sizes = buckets is not None
        self._casting = Casting(self.device, recast, self.note())
        chooses = self._repeat is not None or self._sizes or recast is not None
        self._choosing = Choosing(self, buckets, self._repeat) if chooses else None
        self._stop_recording = recorder.start(self.device)
        self._stay: Callable[[], object] = lambda: None  # cancels the cleanup for a harness that is never closed
        self._send_back = self._stay  # moves a model that came from the host back there
        self._rivals = PlanTrials(fallbacks, correct)
        self._parts = Parts(self)
        try:
            self._install()
        except BaseException:  # leave nothing half installed
            self._meter.stop()
            self._stop_recording()
            self._stay()
            self._peel()
            self._send_back()
            self.stores.close()
            raise
        self._progress = silent  # later plans are reported as notes
        PLANNED.add(model)
        log.info("holdall: %s", plan.summary())
        if caching_configs(model):
            log.info("holdall: no keys and values are kept for decoding in training; `use_cache=True` in a call asks for them")

    # used by actions

    def policy(self, block: str) -> Policy:
        """The policy of a block call, for an action to fill in; an unknown block is refused."""
        path, _, nth = block.partition("#")
        if nth and not nth.isdigit():
            raise Unsupported(f"`{block}` is not a block of this model", hint="trace and plan this model again, or call `fit`")
        try:
            self.model.get_submodule(path)
        except AttributeError:
            raise Unsupported(f"the model has no module `{path}`", hint="plan this model again, or call `fit`") from None
        return self._policies.setdefault(block, Policy())

    def place(self, placing: Placing) -> None:
        """Set where model states live; once."""
        self._placing = placing

    def note(self) -> Callable[[str], None]:
        """The function that shows the user a note, each once."""
        return Notes(self.notes)

    def around(self, context: AbstractContextManager[object]) -> None:
        """Run the loop inside this context, which is entered inside the meter's."""
        self.contexts.append(context)

    def on_close(self, undo: Callable[[], object]) -> None:
        """Call this when the harness is removed from the model."""
        self._undo.append(undo)

    def at_close(self, undo: Callable[[], object]) -> None:
        """To be called when the harness is closed, after its last plan has left the model."""
        self._last.append(undo)

    @property
    def store(self) -> Keeper | None:
        """The store of the nearest tier, where model states live; None: nothing goes there."""
        return self.stores.nearest

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that counts every storage; None unless the device is a CPU."""
        return self._meter.ledger

    def quiet(self) -> AbstractContextManager[object]:
        """A context whose host memory is not counted as device memory."""
        return self._meter.ledger.paused() if self._meter.ledger is not None else nullcontext()

    # installing

    def _install(self) -> None:
        self._send_back = bring(self.model, self.optimizer, self.plan, self.device)
        for action in sorted(self.plan.actions, key=lambda a: a.rank):
            action.install(self)
        if self._placing is not None:
            self.engine = make_engine(self, self._placing, self._progress)
            self.were_ahead = self.engine.were_ahead
        self._meter.start(self.plan.budget.get(self._home) if self._enforce else None)
        if self._enforce:
            lie_close(self)
        self._stay = leave_with(self, self._meter, self._stop_recording)
        if self._meter.ledger is not None and self.engine is not None:
            self._meter.ledger.elsewhere = self.engine.away
        if self.engine is not None and self._home in self.plan.budget:
            gauge = make_gauge(self.device, self._meter, self.plan.budget[self._home], lambda: self._is_stepping)
            self.engine.lender = Lender(self.engine.streaming, gauge)
        self._put_on()

    def _put_on(self) -> None:
        """Install the actions' policies on the modules."""
        if self.plan.about.precision:
            dtype = getattr(torch, self.plan.about.precision)
            self._undo.append(cast_inputs(self.model, dtype, self.plan.about.casts))
        resident = find_resident(self.model, self.engine, self.plan)
        for context in self.contexts:
            context.__enter__()
            self._undo.append(partial(context.__exit__, None, None, None))
        self._blocks = Blocks(self._policies, self.stores, Bank(self._meter.ledger), resident, self.engine)
        self._watch = Watch(self.plan, Notes(self.notes), any_size=self._sizes)
        if self.compiler is not None:
            self.compiler.expect(policy.runner is not None for policy in self._policies.values())
        buffers = dict(self.model.named_buffers())
        modules = dict(self.model.named_modules())
        names = [name for name, _ in self.plan.about.blocks] or list(self._policies)
        for path in dict.fromkeys(name.partition("#")[0] for name in (*names, *self._policies)):
            if path in modules:
                self._wrap(path, modules[path], buffers)
        if self._choosing is not None:
            self._undo.append(put_method(self.model, "_call_impl", partial(self._choosing.call, self.model._call_impl)))
        if self._repeat is not None:
            self._undo.append(watch_backward(self._repeat))
        self._undo.append(copy_plainly(self.model, lambda: self.engine, self.quiet))
        self._undo += self._parts.watch(self.model, names)
        self._undo.append(train_without_cache(self.model))
        self._undo.append(use_arena(self, self._meter))
        self._undo.append(self.model.register_forward_pre_hook(self.begin_step, prepend=True, with_kwargs=True).remove)
        self._undo.append(self.model.register_forward_hook(self._end_forward, always_call=True).remove)
        if self.optimizer is not None:
            self._undo.append(self.optimizer.register_step_post_hook(self._end_step).remove)

    def _wrap(self, path: str, module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        forward = module.forward

        def called(*args: Any, **kwargs: Any) -> Any:
            name = self._watch.called(path, args, kwargs)
            out = self._blocks.run(name, module, forward, buffers, args, kwargs)
            if not self._watch.hears_backward and torch.is_grad_enabled():
                self._watch.hears_backward = at_backward(out, self._watch.backward_began)
            return out

        def planned(*args: Any, **kwargs: Any) -> Any:
            refuse_compiled(path, module)
            return self._parts.run(module, called, args, kwargs)

        self._undo.append(put_method(module, "forward", planned))

    def _there(self) -> list[torch.Tensor]:
        return find_there(self.model, self.optimizer, self.engine)

    # other plans

    def switch(self, plan: Plan) -> None:
        """Go on under another plan from the next step on. What is trained stays; only where things live changes."""
        if self._make_stores is None:
            raise Unsupported("this harness cannot change its plan", hint="use `holdall.apply`")
        if self._sizes:
            raise Unsupported("this harness chooses its plans by the size of the batch", hint="call `fit` without `lengths=`")
        self._next = plan

    def _change(self, plan: Plan) -> None:
        assert self._make_stores is not None
        new, keep = Stores(self._make_stores(plan), plan.budget), None
        if new and new.keys() == self.stores.keys() and plan.budget == self.plan.budget:
            new.close()
            new = keep = self.stores
        self._take_off(keep=keep)
        self._begin_with(plan, new)

    def _begin_with(self, plan: Plan, stores: Stores) -> None:
        """Install a plan on the bare model."""
        self.plan = self.regular = plan
        self.stores = stores
        self._policies, self._placing, self.contexts = {}, None, []
        self._results.begin_anew()
        self._install()
        log.info("holdall: %s", plan.summary())

    def adopt(self, plan: Plan) -> None:
        """Switch at once to a plan with the same placement: no model state moves and counters go on."""
        if self.contexts and self.engine is not None:
            self.engine.settle()
        self._peel()
        placing, self._placing = self._placing, None
        self.plan, self._policies, self.contexts = plan, {}, []
        for action in sorted(plan.actions, key=lambda a: a.rank):
            action.install(self)
        if self._make_stores is not None:
            self.stores.fill((tier for a in plan.actions for tier in a.tiers), partial(self._make_stores, plan))
        if self._placing != placing:
            raise Unsupported(
                "the plan for this batch size places model states differently from the active one",
                hint="name the sizes up front, as in fit(..., lengths=[512, 2048])",
            )
        self._put_on()

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Take the plan off the model while it is traced; model states stay where they are."""
        if self.engine is not None:
            self.engine.rest()
            self.engine.stop_watching()
        self._peel()
        try:
            yield
        finally:
            self.adopt(self.plan)
            if self.engine is not None:
                self.engine.watch()

    def abandon(self) -> None:
        """Discard the state of an aborted step."""
        self._blocks.restart()
        self._watch.again()
        if self.engine is not None:
            self.engine.streaming.release_all()

    def follow_autocast(self) -> None:
        """Before a training forward: plan again if its autocast differs from the traced one."""
        if not self._is_stepping:
            self._casting.look(self.plan, self._plan_anew)

    def _plan_anew(self, make: Callable[[], Prepared]) -> None:
        """Make new plans for the model without a harness, and install them; if none fits, the model stays without."""
        self._take_off()
        numbers = RandomNumbers(self.device)
        try:
            with _disable_current_modes():
                made = make()
            self._rivals = PlanTrials(made.fallbacks, made.correct)
            if self._choosing is not None:
                self._choosing.use(made.buckets)
            assert self._make_stores is not None
            self._begin_with(made.plan, Stores(self._make_stores(made.plan), made.plan.budget))
        except BaseException:
            self._closed = True
            self._stop_recording()
            PLANNED.discard(self.model)
            raise
        finally:
            numbers.put_back()

    # leaving

    def close(self) -> None:
        """Remove the plan from the model and restore it."""
        if self._closed:
            return
        self._closed = True
        self._rivals.close()
        try:
            if self.optimizer is None:
                self._finish_step()
        finally:
            self._stop_recording()
            PLANNED.discard(self.model)
            try:
                self._take_off()
            finally:
                while self._last:
                    self._last.pop()()

    def _peel(self) -> None:
        """Run every undo function, even if one fails."""
        with ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)
            self._undo.clear()

    def _take_off(self, *, keep: Stores | None = None) -> None:
        """`keep`: the stores, if their memory will be used again; taking and pinning it anew would hold up the loop."""
        engine, self.engine = self.engine, None
        try:
            self._peel()
            if engine is not None:
                self._outside = engine.outside
                engine.settle()
            self._results.add_copies(self.stores.copied(self._home))
        finally:
            self._meter.stop()  # the rest is not part of the loop
            self._stay()
            try:
                if engine is not None:
                    engine.close()
            finally:
                self._send_back()
                self._blocks.restart()
                if keep is not None:
                    keep.begin_anew()
                else:
                    self.stores.close()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # steps

    def begin_step(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Pre-forward hook of the model. A caller that creates the harness inside such a hook must call this for
        that forward."""
        refuse_compiled("", module)
        self._parts.enter_model()
        self._change_if_asked()
        if self._choosing is not None and torch.is_grad_enabled():
            self._choosing.choose(args, kwargs)  # usually done before the hooks
        if self.engine is not None:
            args, kwargs = self.engine.begin(args, kwargs)
        if torch.is_grad_enabled():  # without gradients it is an evaluation
            self._begin(args, kwargs)
        return None if self.engine is None else (args, kwargs)

    def _change_if_asked(self) -> None:
        if self._next is not None and not self._is_stepping:
            plan, self._next = self._next, None
            self._change(plan)

    def _begin(self, args: Any, kwargs: Any) -> None:
        if self._is_stepping and (self.optimizer is not None or not self._watch.is_over):
            self._watch.go_on()  # another forward of the same step
            return
        if self.optimizer is None:
            self._finish_step()
        self._blocks.restart()
        self._watch.begin(args, kwargs)
        self._results.begin_step(self.stores.copied(self._home))
        self._meter.begin()
        self._is_stepping = True

    def _end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        self._parts.leave_model()
        if torch.is_grad_enabled():
            at_backward([t for t in tree_iter(output) if type(t) is torch.Tensor], partial(refuse_closed, weakref.ref(self)))
        if self.engine is not None:
            self.engine.end_forward(failed=output is None)

    def begin_part(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A submodule is called on its own: a step begins or continues."""
        self._change_if_asked()
        begun = self.engine.begin(args, kwargs) if self.engine is not None else (args, kwargs)
        if torch.is_grad_enabled():
            self._begin((), {})
        return begun

    def end_part(self, *, failed: bool) -> None:
        if self.engine is not None:
            self.engine.end_forward(failed=failed)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._finish_step()

    def _finish_step(self) -> None:
        self._parts.reset()
        if self._is_stepping:
            self._is_stepping = False
            self._meter.end()
            self._results.add_step(self.plan, self.stores.copied(self._home))
            self._watch.end()
            self._rivals.after_step(self, Notes(self.notes))

    # results

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of every step under the active plan."""
        return self._results.seconds(self.plan)

    @property
    def step_peaks(self) -> list[int]:
        return self._results.peaks(self.plan)

    @property
    def all_peaks(self) -> list[int]:
        """Peak bytes of every step, under any plan."""
        return list(self._meter.peaks())

    def measured(self) -> Outcome | None:
        """The measured outcome; None before the first whole step. Seconds are the median of the steps after the first."""
        if not self._closed:
            self._results.add_copies(self.stores.copied(self._home))
        outside = self.engine.outside if self.engine is not None else self._outside
        process = self.plan.about.process
        elsewhere = {name: store.peak for name, store in self.stores.items()}
        if self.stores.near in elsewhere:
            elsewhere[self.stores.near] += outside + process
        return self._results.measured(self.plan, self._home, elsewhere)

    @property
    def expected(self) -> Outcome:
        """The prediction for the kind of steps measured: clipped, or with speculative updates that were right."""
        return expect(self.plan, ahead=self.is_mostly_ahead)

    @property
    def is_mostly_ahead(self) -> bool:
        return sum(self.were_ahead[1:]) * 2 > len(self.were_ahead[1:])

    def report(self) -> Any:
        """Predicted against measured."""
        if self._make_report is None:
            raise Unsupported("this harness was made without a report", hint="make it with `holdall.apply` or `holdall.fit`")
        return self._make_report(self)
