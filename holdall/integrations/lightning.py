"""Lightning by one callback, Fabric by one line after `fabric.setup`.

trainer = L.Trainer(..., callbacks=[holdall.integrations.lightning.HoldallCallback(budget="24GiB")])
fitting = holdall.integrations.lightning.fit(fabric, model, optimizer, budget="24GiB")

On several processes the callback has Lightning's DDPStrategy leave the module unwrapped, and the first step shards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from typing import Any

import torch

from holdall.errors import InvalidInput, MissingExtra, Unsupported
from holdall.fitting.request import FitRequest
from holdall.integrations._fitting import Fitting, need, refuse_divided
from holdall.integrations._lightning_saving import LightningSaving
from holdall.problem import Budget
from holdall.reporting import Report
from holdall.runtime.harness import Harness
from holdall.sharded import sharded_parameter
from holdall.tracing.step import Loss


def _find_lightning() -> Any:
    """Import Lightning under either of its two names."""
    try:
        return need("lightning.pytorch", what="holdall.integrations.lightning", package="lightning", extra="lightning")
    except MissingExtra as missing:
        try:
            return need("pytorch_lightning", what="", package="", extra="")
        except MissingExtra:
            raise missing from None


_lightning = _find_lightning()

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class HoldallCallback(_lightning.Callback):  # type: ignore[misc,name-defined]
    """Trains a `LightningModule` inside a budget: plans at the first step, removes the plan at the end or when training raises.

    `batch`: plan for this one instead of the first in training; pass the largest if lengths differ. `options`: other arguments
    of `holdall.fit`; accumulation is taken from the trainer. On several processes the module is sharded over them by `shard`,
    with `mesh="auto"` unless given, and stays so. While it is on, gradients are freed right after the update instead
    of during the next step, where they would add to the activations.
    """

    def __init__(self, budget: Budget = "auto", *, planner: str = "auto", batch: Any = None, **options: Any) -> None:
        if "accumulate" in options:
            raise InvalidInput("`accumulate` is taken from the trainer", hint="set `Trainer(accumulate_grad_batches=...)`")
        self._batch = None if batch is None else (batch, 0)
        self._asked = {"budget": budget, "planner": planner, **options}
        self._fitting: Fitting | None = None
        self._undo: list[Callable[[], object]] = []
        self._saving: LightningSaving | None = None

    @property
    def harness(self) -> Harness | None:
        """None before the first step."""
        return self._fitting.harness if self._fitting is not None else None

    def report(self) -> Report:
        """Predicted against measured."""
        if self._fitting is None:
            raise InvalidInput("there is nothing to report before training", hint="call `report()` after `trainer.fit(...)`")
        return self._fitting.report()

    def close(self) -> None:
        """Remove the plan from the module."""
        try:
            if self._fitting is not None:
                self._fitting.close()
        finally:
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()

    # events

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.world_size > 1 and sharded_parameter(pl_module):
            what = "the module is sharded over processes already, and the trainer would copy its weights from one of them"
            raise Unsupported(what, hint="build it again, and load a checkpoint of holdall.save_checkpoint into it")
        if stage == "fit" and trainer.world_size > 1:
            _refuse_over_ranks(trainer, self._asked.get("mesh"))
            self._undo.append(_put(trainer.strategy, "configure_ddp", lambda: None))
            self._saving = LightningSaving(trainer.strategy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        _refuse(trainer, pl_module)
        optimizer = trainer.optimizers[0]
        through = [_through_call(pl_module, name) for name in _STEPS]
        if trainer.world_size > 1:  # the module stays sharded: its parts are gathered in calls
            self._asked.setdefault("mesh", "auto")
        else:
            self._undo += through
        self._undo.append(_close_before_step(optimizer))
        self._fitting = Fitting(
            pl_module,
            optimizer,
            FitRequest.of(accumulate=trainer.accumulate_grad_batches, **self._asked),
            batch=self._batch,
            tracing=lambda: _unlogged(pl_module),
            then=None if self._saving is None else partial(self._saving.load_waiting_states, optimizer),
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        step = trainer.global_step
        if self._fitting is None or not (step in (1, trainer.max_steps) or step % trainer.log_every_n_steps == 0):
            return  # reading a step's time waits for the device
        metrics = self._fitting.metrics()
        with self._fitting.uncounted():
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        self.close()


def fit(
    fabric: Any,
    model: torch.nn.Module,
    optimizer: Any,
    batch: Any = None,
    *,
    budget: Budget = "auto",
    planner: str = "auto",
    loss: Loss | None = None,
    accumulate: int = 1,
    **options: Any,
) -> Fitting:
    """Fabric: train inside a budget from the first step on; `close()` or a `with` block removes the plan.

    `batch`: plan for this one, now; otherwise for the first batch in training. `accumulate`: backwards per step.
    """
    if fabric.world_size > 1:
        what = f"Fabric wraps the model for its {fabric.world_size} devices by itself"
        raise Unsupported(what, hint='use `Fabric(devices=1)`, or holdall.fit(..., mesh="auto") in the place of `fabric.setup`')
    request = FitRequest.of(budget=budget, planner=planner, loss=loss, accumulate=accumulate, **options)
    own = getattr(model, "module", model)  # inside Fabric's wrappers
    fitting = Fitting(own, getattr(optimizer, "optimizer", optimizer), request, tracing=fabric.autocast)
    if batch is not None:
        try:
            fitting.start(batch)
        except BaseException:
            fitting.close()
            raise
    return fitting


def _refuse(trainer: Any, module: Any) -> None:
    if not module.automatic_optimization:
        hint = "call `holdall.fit` on the network inside the module, or use automatic optimization"
        raise Unsupported("the module optimizes by hand (`automatic_optimization = False`)", hint=hint)
    if len(trainer.optimizers) != 1:
        raise Unsupported(f"the module has {len(trainer.optimizers)} optimizers", hint="use one, with several parameter groups")
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        raise Unsupported("LBFGS runs several forwards and backwards per update", hint="use another optimizer")
    if trainer.world_size > 1 and trainer.strategy.model is not module:
        what = "the trainer has wrapped the module for several processes, and holdall shards it itself"
        raise Unsupported(what, hint="pass the callback to the trainer: Trainer(..., callbacks=[callback])")


def _refuse_over_ranks(trainer: Any, mesh: Any) -> None:
    """Refuse settings that do not work on a module that holdall shards."""
    kind = type(trainer.strategy).__name__
    if kind != "DDPStrategy":
        raise Unsupported(f"the trainer's strategy is {kind}", hint='use Trainer(strategy="ddp"): holdall shards the module')
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise Unsupported("loss scaling has not been tried on several processes", hint='use precision="bf16-mixed"')
    refuse_divided(mesh)


def _through_call(module: Any, name: str) -> Callable[[], object]:
    """Route Lightning's calls of a step through the module's `__call__`, which the harness hooks. Returns the undo."""
    step = getattr(module, name)

    @wraps(step)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _attribute(module, "forward", _Detour(module, step)):
            return module(*args, **kwargs)

    return _put(module, name, called)


class _Detour:
    """A step of a module as its forward, in a call of the module. A copy of the module, as is traced over ranks, gets its own,
    and Lightning takes the trainer from it."""

    is_detour = True

    def __init__(self, module: Any, step: Callable[..., Any]) -> None:
        self._module, self._step = module, step
        self._forward = module.__dict__.get("forward")
        self._trainer = _Shared(module._trainer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._module._trainer = self._trainer.own
        with _attribute(self._module, "forward", self._forward):  # a step may call the module itself
            return self._step(*args, **kwargs)


class _Shared:
    """Holds what copies of its owner share with it."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


def _close_before_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Run Lightning's closure (forward and backward) before `optimizer.step()` instead of inside it. Returns the undo."""
    original = optimizer.step

    @wraps(original)
    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        original(**kwargs)
        optimizer.zero_grad()
        return loss

    return _put(optimizer, "step", step)


def _put(owner: Any, name: str, value: Any) -> Callable[[], object]:
    """Set an instance attribute; None: remove it, so that the class's is used. Returns the undo."""
    before = owner.__dict__.get(name)

    def put(value: Any) -> None:
        if value is None:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = value

    put(value)
    return lambda: put(before)


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`_put` for a while."""
    undo = _put(owner, name, value)
    try:
        yield
    finally:
        undo()


@contextmanager
def _unlogged(module: Any) -> Iterator[None]:
    """Disable logging, metrics and lists of the module while a step is traced: its values are fake."""
    number = torch.zeros(())  # a metric's value; made here, so that no op of a metric is traced

    def value(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG001
        return number

    with ExitStack() as stack:
        stack.enter_context(_own_values(module))
        for name in ("log", "log_dict"):
            stack.enter_context(_attribute(module, name, _nothing))
        for metric in filter(_is_metric, module.modules()):
            for name, stand_in in (("forward", value), ("update", _nothing), ("compute", value)):
                stack.enter_context(_attribute(metric, name, stand_in))
        yield


@contextmanager
def _own_values(module: Any) -> Iterator[None]:
    """Restore the numbers, lists, sets and dictionaries among a module's plain attributes afterwards."""
    kinds = (int, float, list, set, dict)
    before: dict[str, tuple[Any, Any]]
    before = {k: (v, copy(v)) for k, v in module.__dict__.items() if isinstance(v, kinds) and not k.startswith("_")}
    try:
        yield
    finally:
        for name, (own, was) in before.items():
            if isinstance(own, list):
                own[:] = was
            elif isinstance(own, (set, dict)):
                own.clear()
                own.update(was)
            module.__dict__[name] = own


def _is_metric(module: torch.nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces logging functions."""
