"""Installs a harness at the first training step of a trainer's loop.

The batch is unknown before the loop passes one to the model: a hook waits for the first training forward, traces and plans with
its arguments, installs the harness and lets the forward continue. So only the trainer reads its data loader, and the random
numbers are not disturbed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdall import api
from holdall.cost.roofline import cost_trace
from holdall.errors import Infeasible, InvalidInput, MissingExtra, Unsupported
from holdall.fitting.replan import MARGIN, margin_of
from holdall.fitting.request import FitRequest
from holdall.fitting.start import device_of_batch, start
from holdall.problem import resolve_budget, resolve_hardware
from holdall.reporting import Report
from holdall.runtime.harness import Harness
from holdall.tracing.step import Loss, call_model, default_loss
from holdall.types import Hardware, Phase, Plan, Trace
from holdall.types.mesh import DIVIDING
from holdall.units import GiB, format_bytes

log = logging.getLogger("holdall")


def need(module: str, *, what: str, package: str, extra: str) -> Any:
    """Import an optional package, or raise an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{what} needs the package `{package}`", hint=f'pip install "holdall[{extra}]"') from error


def loss_of_any_output(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss that the model returns. If the trainer computes it from the outputs, their sum stands for it."""
    return _loss_in(call_model(model, batch))


def _loss_of_a_call(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs = batch
    return _loss_in(model(*args, **kwargs))


def _loss_in(output: Any) -> torch.Tensor:
    try:
        return default_loss(lambda: output, ())  # type: ignore[arg-type]
    except InvalidInput:
        values = list(output.values()) if isinstance(output, Mapping) else output
        outputs = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outputs:
            raise
    log.info(
        "holdall: the model returns no loss; the plan does not count the memory of the trainer's loss (pass it as `loss=`)"
    )
    return torch.stack([t.float().sum() for t in outputs]).sum()


class Fitting:
    """Waits for the first training forward of `model`, then holds a harness until `close`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        request: FitRequest,
        *,
        batch: Any = None,
        tracing: Callable[[], AbstractContextManager[object]] = nullcontext,
        then: Callable[[], object] | None = None,
    ) -> None:
        self.harness: Harness | None = None
        self._model, self._optimizer, self._request = model, optimizer, request
        self._batch = batch  # to plan for, such as the largest; None: the first in training
        self._tracing = tracing  # contexts to enter while the step is traced
        self._then = then  # called when the harness is on, before the first step
        self.undo: list[Callable[[], object]] = []  # what `close` restores besides
        self._silence = _speak_past_the_bar()
        self._hook = model.register_forward_pre_hook(self._first_forward, prepend=True, with_kwargs=True)

    def _first_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and model.training):
            return None  # an evaluation before the first step
        self._hook.remove()
        before = set(model._forward_pre_hooks)
        if self._batch is not None:
            self.start(self._batch)
        elif args and kwargs:
            self.start((args, kwargs), loss=_loss_of_a_call)
        else:
            self.start(dict(kwargs) if kwargs else tuple(args))
        return _run_hooks_since(model, before, args, kwargs)

    def start(self, batch: Any, *, loss: Loss = loss_of_any_output) -> None:
        """Trace, plan and apply now."""
        self._hook.remove()
        request = self._request if self._request.loss is not None else replace(self._request, loss=loss)
        with _undisturbed(), self._tracing():
            self.harness = fit(request, self._model, self._optimizer, batch)
            if self._then is not None:
                self._then()

    def metrics(self) -> dict[str, float]:
        """For a trainer's log: the last step, measured and predicted. Empty before the first whole step."""
        harness = self.harness
        if harness is None or not harness.step_peaks:
            return {}
        home, predicted = next(iter(harness.plan.budget)), harness.plan.predicted
        return {
            "holdall/peak_gib": harness.step_peaks[-1] / GiB,
            "holdall/peak_predicted_gib": predicted.peak[home] / GiB,
            "holdall/budget_gib": harness.plan.budget[home] / GiB,
            "holdall/step_seconds": harness.step_seconds[-1],
            "holdall/step_predicted_seconds": predicted.seconds,
        }

    def uncounted(self) -> AbstractContextManager[object]:
        """A context for work outside the loop, which is not counted against the budget on a CPU."""
        ledger = self.harness.ledger if self.harness is not None else None
        return ledger.paused() if ledger is not None else nullcontext()

    def report(self) -> Report:
        """Predicted against measured."""
        if self.harness is None:
            raise InvalidInput(
                "there is nothing to report before the first training step", hint="call `report()` after training"
            )
        return api.make_report(self.harness)

    def close(self) -> None:
        """Remove the plan from the model; the report stays available."""
        self._hook.remove()
        self._silence()
        while self.undo:
            self.undo.pop()()
        if self.harness is not None:
            self.harness.close()

    def __enter__(self) -> Fitting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def refuse_divided(mesh: Any) -> None:
    """Refuse meshes over which a model is divided, for trainers on several processes."""
    others = [name for name in mesh if name in DIVIDING] if isinstance(mesh, Mapping) else []
    if others:
        raise Unsupported(
            f"the trainer gives every process a batch of its own, and `{others[0]}` divides one",
            hint='use mesh="auto", or a loop of your own with holdall.fit',
        )


def _run_hooks_since(model: torch.nn.Module, before: Collection[int], args: Any, kwargs: Any) -> Any:
    """Run the hooks that were registered inside of one, too late for this forward: the harness's own, and those of torch's
    engine of shards."""
    for number, hook in list(model._forward_pre_hooks.items()):
        if number in before:
            continue
        if number not in model._forward_pre_hooks_with_kwargs:
            changed = hook(model, args)
            args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
        elif (both := hook(model, args, kwargs)) is not None:
            args, kwargs = both
    return args, kwargs


def fit(request: FitRequest, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> Harness:
    """`holdall.fit`, with part of the budget reserved for the trainer's own tensors."""
    device = request.device or device_of_batch(batch) or _device_of(model)
    machine = resolve_hardware(request.hardware, torch.device(device).type, request.budget)
    # a trainer reads the batches of a step together, and a loop's variable holds the one before
    batches = request.accumulate * sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
    whole = resolve_budget(request.budget, machine)
    room = _Room(budget=whole, machine=machine, accumulate=request.accumulate, batches=batches)
    return start(replace(request, device=device, hardware=machine, budget=room.left), model, optimizer, batch, room=room)


def _device_of(model: torch.nn.Module) -> torch.device:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Plans for the part of the budget that a trainer leaves; the whole budget is enforced, and predictions include the
    trainer's part.
    """

    budget: dict[str, int]
    machine: Hardware
    accumulate: int
    batches: int  # bytes of batches other than the step's own

    @property
    def home(self) -> str:
        return self.machine.home.name

    @property
    def left(self) -> dict[str, int]:
        """The budget to plan for."""
        whole = self.budget[self.home]
        return {**self.budget, self.home: max(1, whole - margin_of(whole) - self.batches)}

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Rephrase `Infeasible` in terms of the whole budget."""
        try:
            yield
        except Infeasible as error:
            if error.smallest is None:
                raise
            least = error.smallest + self.batches
            smallest = min(least + MARGIN, least * 100 // 99 + 2)  # with the margin of that budget
            fact = f"{error.fact}; the trainer needs {format_bytes(smallest - error.smallest)} more"
            raise Infeasible(fact, hint=f"use a budget of at least {smallest} bytes", smallest=smallest) from error

    def as_measured(self, made: Plan, traced: Trace) -> Plan:
        peak = made.predicted.peak[self.home] + self.batches
        update = sum(op.seconds for op in cost_trace(traced, self.machine).ops if op.site.phase is Phase.STEP)
        again = max(0.0, made.predicted.seconds - update)  # one more backward without an update
        seconds = made.predicted.seconds + (self.accumulate - 1) * again
        predicted = replace(made.predicted, peak={**made.predicted.peak, self.home: peak}, seconds=seconds)
        return replace(made, budget=self.budget, predicted=predicted)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random numbers and clear autocast's cache, so that tracing leaves no mark on the loop."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), _numpy_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy()
            torch.clear_autocast_cache()  # it would hold casts that are fake tensors


def _numpy_state() -> Callable[[], object]:
    """Returns the function that restores numpy's global random state."""
    import numpy

    state = numpy.random.get_state()
    return lambda: numpy.random.set_state(state)


def _speak_past_the_bar() -> Callable[[], object]:
    """If holdall's log has no handler, print its lines above the progress bar instead of through it. Returns the undo."""
    if log.hasHandlers():
        return lambda: None
    try:
        tqdm: Any = import_module("tqdm").tqdm
    except ImportError:
        return lambda: None

    class AboveTheBar(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tqdm.write(self.format(record))

    handler = AboveTheBar(level=logging.WARNING)
    log.addHandler(handler)
    return lambda: log.removeHandler(handler)
