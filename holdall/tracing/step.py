"""One training step for the recorder: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from holdall.casts import cast_inputs, may_cast
from holdall.decoding import train_without_cache
from holdall.errors import InvalidInput
from holdall.tracing.calls import Given
from holdall.tracing.recorder import Recorder
from holdall.tracing.units import Updating
from holdall.tracing.values.effects import NONE, Effects
from holdall.types import Block, Kind, Op, Phase, Save, TensorInfo, Unit

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """`model(**batch).loss`, as Hugging Face models return it; for tuples `model(*batch)`. The output is released at once."""
    output = call_model(model, batch)
    if isinstance(output, torch.Tensor):
        return output
    loss: torch.Tensor | None = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        loss = output[0]
    if loss is None:
        raise InvalidInput(
            f"the model returned {type(output).__name__} without a `loss`",
            hint="put labels into the batch, or pass `loss=lambda model, batch: ...` that returns a scalar",
        )
    return loss


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def check_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise InvalidInput(f"the loss is {type(loss).__name__}, not a tensor", hint="return a scalar tensor from `loss=`")
    if loss.numel() != 1:
        raise InvalidInput(
            f"the loss has shape {list(loss.shape)}, but backward needs a scalar",
            hint="pass `loss=lambda model, batch: ...` that returns a scalar, for example a mean",
        )
    if not loss.requires_grad:
        raise InvalidInput("the loss does not require a gradient", hint="is every parameter frozen, or grad mode off?")
    return loss


@dataclass(frozen=True, kw_only=True)
class How:
    """The dtypes a step computes in."""

    precision: torch.dtype | None = None  # of working copies of the float32 parameters; None: no copies
    autocast: torch.dtype | None = None  # around forward and loss; None: off
    needed: frozenset[str] = frozenset()  # with a precision: classes of user modules whose inputs must be cast

    @contextmanager
    def casting(self, model: torch.nn.Module) -> Iterator[list[str]]:
        """Make modules with working copies cast their inputs; yields the paths of those that did."""
        found: dict[str, None] = {}
        if self.precision is None:
            yield []
            return
        end = cast_inputs(model, self.precision, may_cast(model, self.needed), seen=found.setdefault)
        listed: list[str] = []
        try:
            yield listed
        finally:
            listed += found
            end()


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recorded step."""

    ops: tuple[Op, ...]
    tensors: dict[int, TensorInfo]
    saves: tuple[Save, ...]
    blocks: tuple[Block, ...]
    units: tuple[Unit, ...]
    whole: Block | None = None
    asked: tuple[str, ...] = ()  # calls that read a value
    called: tuple[tuple[int, ...], ...] = ()  # shapes of the tensors passed to the model's first call
    autocast: torch.dtype | None = None  # active when the model was called
    casts: tuple[str, ...] = ()  # modules that cast their inputs to the precision
    given: dict[str, Given] = field(default_factory=dict)  # block -> the arguments of its call
    effects: Effects = NONE  # of the whole forward
    parts: bool = False  # submodules were called directly
    calls: int = 1  # calls of the model itself
    timed: bool = False  # ops carry seconds measured on the device
    looked_at: tuple[int, ...] = ()  # indices of batch tensors whose values decide the control flow


class Step(torch.nn.Module):
    """The whole step as one module, so that parameters swapped in for its call stay during backward."""

    def __init__(self, model: torch.nn.Module, recorder: Recorder, loss: Loss, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self._recorder = recorder
        self._loss = loss
        self._autocast = autocast

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss, which the loop's variable holds until the next step."""
        recorder = self._recorder
        with ExitStack() as stack:
            stack.callback(train_without_cache(self.model))
            stack.enter_context(recorder.saving())
            stack.enter_context(self._casting())
            loss = self._loss(self.model, batch)
        check_loss(loss)
        recorder.remember_loss(loss)
        recorder.phase = Phase.BACKWARD
        loss.backward()
        return loss

    def _casting(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._recorder.device, dtype=self._autocast)


def state_tensors(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of an optimizer's state with a name."""
    found = []
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found.append((f"{names.get(id(parameter), 'parameter')}.{key}", value))
    return found


def record_optimizer(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    """Record the optimizer's step; its state exists already, as from the second step on."""
    recorder.phase = Phase.STEP
    recorder.values.guess = True
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def record_narrow_update(
    recorder: Recorder, updating: Updating, parameters: Mapping[str, torch.nn.Parameter], units: Mapping[str, list[str]]
) -> None:
    """Record the update of masters from the gradients of lower-precision copies, unit by unit."""
    recorder.phase = Phase.STEP
    recorder.values.guess = True
    for names in units.values():
        for narrow in (True, False):
            part = [n for n in names if n in updating.values and (n in updating.narrow) == narrow]
            part = [n for n in part if parameters[n].grad is not None]
            if part:
                updating.update(part, [parameters[n].grad for n in part])  # type: ignore[misc]
        for n in names:
            parameters[n].grad = None


def materialise_state(recorder: Recorder, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Create the optimizer's state by one unrecorded update, and register it with the recorder."""
    recorder.values.guess = True
    with recorder.quiet():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.seed(state_tensors(optimizer, names), Kind.STATE)
    recorder.values.guess = False
