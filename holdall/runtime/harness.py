"""The model with a plan installed. Leaving the harness restores it.

The harness replaces the forward of the modules that the plan names, counts bytes, times steps and watches whether the loop
still does what was traced. It knows no action by name: actions fill in policies when they install themselves.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.runtime.ledger import Ledger
from holdall.runtime.meter import CpuMeter, CudaMeter, Meter
from holdall.runtime.parking import Bank
from holdall.runtime.policy import Blocks, Policy
from holdall.runtime.watch import Watch
from holdall.types import Moment, Outcome, Plan

log = logging.getLogger("holdall")


class Notes:
    """What the user should know: said once, kept for the report. Knows no harness, so that no cycle holds the model."""

    def __init__(self, kept: list[str]) -> None:
        self._kept = kept

    def __call__(self, message: str) -> None:
        if message not in self._kept:
            self._kept.append(message)
            log.warning("holdall: %s", message)


class Harness:
    """A context manager around the user's own loop; also usable as it is, with `close()` at the end."""

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        store: Any,
        enforce: bool = True,
        make_report: Callable[[Harness], Any] | None = None,
    ) -> None:
        self.plan = plan
        self.model = model
        self.optimizer = optimizer
        self.store = store
        self.notes: list[str] = []
        self.step_seconds: list[float] = []
        self.step_peaks: list[int] = []
        self._make_report = make_report
        self._policies: dict[str, Policy] = {}
        self._undo: list[Callable[[], object]] = []
        self._began: float | None = None
        self._curve: list[tuple[float, int]] = []
        self._device = _device_of(model)
        self._home = next(iter(plan.budget), "cpu")
        self._meter: Meter = CpuMeter(model, optimizer) if self._device.type == "cpu" else CudaMeter(self._device)
        self._enforce = enforce
        self._closed = False
        for action in sorted(plan.actions, key=lambda a: a.rank):
            action.install(self)
        self._install()
        log.info("holdall: %s", plan.summary())

    # what actions use

    def policy(self, block: str) -> Policy:
        """The policy of a block call, to be filled in; an unknown block is refused."""
        path, _, nth = block.partition("#")
        if nth and not nth.isdigit():
            raise Unsupported(f"`{block}` does not name a block call", hint="plan again for this model")
        try:
            self.model.get_submodule(path)
        except AttributeError:
            raise Unsupported(f"the model has no module `{path}`", hint="plan again for this model") from None
        return self._policies.setdefault(block, Policy())

    # installing and leaving

    def _install(self) -> None:
        resident = {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
        self._meter.start(self.plan.budget.get(self._home) if self._enforce else None)
        self._blocks = Blocks(self._policies, self.store, Bank(self._meter.ledger), resident.__contains__)
        self._watch = Watch(self.plan, Notes(self.notes))
        buffers = dict(self.model.named_buffers())
        modules = dict(self.model.named_modules())
        names = [name for name, _ in self.plan.about.get("blocks", ())] or list(self._policies)
        for path in dict.fromkeys(name.partition("#")[0] for name in (*names, *self._policies)):
            if path in modules:
                self._wrap(path, modules[path], buffers)
        handle = self.model.register_forward_pre_hook(self._begin_step, prepend=True, with_kwargs=True)
        self._undo.append(handle.remove)
        if self.optimizer is not None:
            self._undo.append(self.optimizer.register_step_post_hook(self._end_step).remove)

    def _wrap(self, path: str, module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
        forward = module.forward
        had_own = "forward" in module.__dict__

        def planned(*args: Any, **kwargs: Any) -> Any:
            name = self._watch.called(path, args, kwargs)
            return self._blocks.run(name, module, forward, buffers, args, kwargs)

        module.forward = planned  # type: ignore[method-assign]

        def undo() -> None:
            if had_own:
                module.forward = forward  # type: ignore[method-assign]
            else:
                del module.forward

        self._undo.append(undo)

    def close(self) -> None:
        """Take everything off the model again."""
        if self._closed:
            return
        self._closed = True
        if self.optimizer is None:
            self._finish_step()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._blocks.restart()
        self._meter.stop()
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # steps

    def _begin_step(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if not torch.is_grad_enabled():  # evaluation
            return
        if self._began is not None and self.optimizer is not None:
            self._watch.again()  # gradient accumulation: another forward of the same step
            return
        if self.optimizer is None:
            self._finish_step()
        self._blocks.restart()
        self._watch.begin(args, kwargs)
        self._meter.begin()
        self._began = time.perf_counter()

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._finish_step()

    def _finish_step(self) -> None:
        if self._began is None:
            return
        self._meter.settle()
        self.step_seconds.append(time.perf_counter() - self._began)
        self.step_peaks.append(self._meter.peak())
        self._curve = self._meter.curve(self._began)
        self._began = None
        self._watch.end()

    # results

    @property
    def ledger(self) -> Ledger | None:
        return self._meter.ledger

    def measured(self) -> Outcome | None:
        """What was seen; None before the first whole step. Seconds are the median of the steps after the first."""
        if not self.step_seconds:
            return None
        seconds = statistics.median(self.step_seconds[1:] or self.step_seconds)
        peak = {self._home: max(self.step_peaks)}
        if self.store is not None:
            peak[self.store.name] = self.store.peak
        width = max(1, len(self._curve) // 1200)
        timeline = tuple(
            Moment(at=at, where="", total=total)
            for at, total in (max(self._curve[i : i + width], key=lambda m: m[1]) for i in range(0, len(self._curve), width))
        )
        return Outcome(source="measured", seconds=seconds, peak=peak, reserved=self._meter.reserved(), timeline=timeline)

    def report(self) -> Any:
        """Predicted against measured."""
        if self._make_report is None:
            raise Unsupported("this harness was made without a report", hint="use `holdall.apply`")
        return self._make_report(self)


def _device_of(model: torch.nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    if device.type == "meta":
        raise Unsupported("the model has no weights (it lies on the meta device)", hint="build it on a real device")
    return device
