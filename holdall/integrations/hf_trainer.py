"""`transformers.Trainer`, and its subclasses, by one callback.

trainer = Trainer(..., callbacks=[holdall.integrations.HoldallCallback(budget="24GiB")])

On several processes the model is sharded over them, in the place of the DistributedDataParallel that the trainer would wrap it
in: accelerate prepares it as for an evaluation when the trainer is built, and leaves it as it is afterwards. What the trainer
saves then is gathered by all processes (`_trainer_saving.py`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import TracebackType
from typing import Any

from holdall.errors import InvalidInput, Unsupported
from holdall.fitting.request import FitRequest
from holdall.integrations._fitting import Fitting, need, refuse_divided
from holdall.integrations._trainer_saving import TrainerSaving
from holdall.problem import Budget
from holdall.reporting import Report
from holdall.runtime.harness import Harness
from holdall.tracing.step import Loss

_transformers = need("transformers", what="HoldallCallback", package="transformers", extra="hf")


class HoldallCallback(_transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Trains inside a budget: plans at the first step, removes the plan at the end, adds figures to the trainer's log.

    `batch`: plan for this one instead of the first in training; pass the largest if lengths differ. `loss`: see `holdall.fit`.
    `options`: other arguments of `holdall.fit`; accumulation is read from the trainer. On several processes the model is
    sharded over them by `shard`, with `mesh="auto"` unless given. The trainer has no event for a training that raises: call
    `close()` then, or use a `with` block.
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
        self._leaves_alone: Any = None  # the model that accelerate does not wrap
        self._saving: TrainerSaving | None = None

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

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if args.world_size > 1:
            _refuse(args)
            _refuse_over_ranks(args, self._asked.get("mesh"))
            accelerator = import_module("accelerate").Accelerator()  # all of a process share their state
            accelerator.prepare_model(kwargs["model"], device_placement=False, evaluation_mode=True)  # not to wrap it later
            self._leaves_alone = kwargs["model"]
        trainer = _trainer()
        self._saving = None if trainer is None else TrainerSaving(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.close()  # after a training that raised
        _refuse(args)
        if args.world_size > 1:
            if self._leaves_alone is not kwargs["model"]:
                what = "the trainer has wrapped the model for several processes, and holdall shards it itself"
                raise Unsupported(what, hint="pass the callback to the trainer: Trainer(..., callbacks=[callback])")
            assert self._saving is not None, "no trainer has been built"
            self._asked.setdefault("mesh", "auto")
            if args.load_best_model_at_end and hasattr(kwargs["model"], "peft_config"):
                what = "`load_best_model_at_end` is on, and PEFT loads adapters into whole models"
                raise Unsupported(what, hint="set load_best_model_at_end=False, and load the best checkpoint after training")
        _come_first(self)
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        request = FitRequest.of(accumulate=args.gradient_accumulation_steps, **self._asked)
        then = self._saving.load_waiting_states if self._saving is not None else None
        self._fitting = Fitting(kwargs["model"], optimizer, request, batch=self._batch, then=then)
        if args.world_size > 1 and self._saving is not None:
            self._fitting.undo.append(self._saving.keep_alone(kwargs["model"]))

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
    if args.n_gpu > 1:
        hint = f"start it with `torchrun --nproc-per-node {args.n_gpu}`, or train on one device (CUDA_VISIBLE_DEVICES=0)"
        raise Unsupported(f"the trainer uses {args.n_gpu} devices in one process", hint=hint)


def _refuse_over_ranks(args: Any, mesh: Any) -> None:
    """Refuse settings that do not work on a model that holdall shards."""
    wrong = [name for name in ("fsdp", "deepspeed") if getattr(args, name, None)]
    if wrong:
        raise Unsupported(f"the trainer shards the model by `{wrong[0]}`", hint=f"leave `{wrong[0]}` out: holdall shards it")
    if getattr(args, "fp16", False):
        raise Unsupported(
            "loss scaling has not been tried on several processes", hint="set fp16=False, and bf16=True if need be"
        )
    refuse_divided(mesh)


def _trainer() -> Any:
    """The trainer that is being built. Events do not carry it, so it is looked up in the calling frames."""
    frame = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), _transformers.Trainer):
        frame = frame.f_back  # type: ignore[assignment]
    return frame and frame.f_locals["self"]


def _come_first(callback: HoldallCallback) -> None:
    """Move our callback to the front, so that trackers see the figures that it adds to a log.

    Events carry no handler, so it is looked up in the calling frame; if it is not found, trackers miss our figures.
    """
    frame = sys._getframe(2)
    callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
