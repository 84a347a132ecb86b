"""`transformers.Trainer`, and its subclasses, by one callback.

trainer = Trainer(..., callbacks=[holdall.integrations.HoldallCallback(budget="24GiB")])
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from holdall.errors import InvalidInput, Unsupported
from holdall.fitting.request import FitRequest
from holdall.integrations._fitting import Fitting, need
from holdall.problem import Budget
from holdall.reporting import Report
from holdall.runtime.harness import Harness
from holdall.tracing.step import Loss

_transformers = need("transformers", what="HoldallCallback", package="transformers", extra="hf")


class HoldallCallback(_transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Trains inside a budget: plans at the first step, removes the plan at the end, adds figures to the trainer's log.

    `batch`: plan for this one instead of the first in training; pass the largest if lengths differ. `loss`: see `holdall.fit`.
    `options`: other arguments of `holdall.fit`; accumulation is read from the trainer. The trainer has no event for a training
    that raises: call `close()` then, or use a `with` block.
    """

    def __init__(
        self, budget: Budget = "auto", *, planner: str = "auto", batch: Any = None, loss: Loss | None = None, **options: Any
    ) -> None:
        if "accumulate" in options:
            raise InvalidInput(
                "`accumulate` is taken from the trainer", hint="set `gradient_accumulation_steps` in TrainingArguments"
            )
        self._asked = {"budget": budget, "planner": planner, "loss": loss, **options}
        self._batch = batch
        self._fitting: Fitting | None = None

    @property
    def harness(self) -> Harness | None:
        """None before the first step."""
        return self._fitting.harness if self._fitting is not None else None

    def report(self) -> Report:
        """Predicted against measured."""
        if self._fitting is None:
            raise InvalidInput("there is nothing to report before training", hint="call `report()` after `trainer.train()`")
        return self._fitting.report()

    def close(self) -> None:
        """Remove the plan from the model. `on_train_end` does so too."""
        if self._fitting is not None:
            self._fitting.close()

    def __enter__(self) -> HoldallCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.close()  # after a training that raised
        _refuse(args)
        _come_first(self)
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        request = FitRequest.of(accumulate=args.gradient_accumulation_steps, **self._asked)
        self._fitting = Fitting(kwargs["model"], optimizer, request, batch=self._batch)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:  # noqa: ARG002
        if self._fitting is None or logs is None or not ({"loss", "train_runtime"} & logs.keys()):
            return  # the log of an evaluation
        metrics = self._fitting.metrics()
        logs.update(metrics)
        if state.log_history:  # written before the callbacks run
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.close()


def _refuse(args: Any) -> None:
    """Refuse settings that a plan replaces, and several processes."""
    if args.gradient_checkpointing:
        raise Unsupported(
            "`gradient_checkpointing` is on", hint="set gradient_checkpointing=False: the plan decides what is recomputed"
        )
    if args.torch_compile:
        raise Unsupported(
            "`torch_compile` is on", hint="set torch_compile=False; HoldallCallback(compile=True) compiles blocks under a plan"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        hint = "train on one device (CUDA_VISIBLE_DEVICES=0), or over ranks in a loop of your own or of accelerate"
        raise Unsupported(f"the trainer uses {max(args.world_size, args.n_gpu)} devices", hint=hint)


def _come_first(callback: HoldallCallback) -> None:
    """Move our callback to the front, so that trackers see the figures that it adds to a log.

    Events carry no handler, so it is looked up in the calling frame; if it is not found, trackers miss our figures.
    """
    frame = sys._getframe(2)
    callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
