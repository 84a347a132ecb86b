"""Retries a step that ran out of memory under a tighter plan, once, with the same bits.

In forward: the model's call is caught, its side effects are undone (random numbers, buffers, attributes), and it runs again. In
backward: the gradients at the model's outputs are known, so the gradients of this backward are dropped, the forward runs again,
and the backward continues from its outputs.

The autograd graph of the first attempt must be freed to make room. The loop holds it through its loss and the model's outputs,
which are detached in place. Side effects that cannot be undone are checked first; the error is then raised with the reason:
accumulated gradients of an earlier backward, parameters already updated, a loss that reaches parameters without passing the
model's outputs, several processes that train together.

Lazy logits (`lazy_logits.py`) are outputs without a gradient: their chunked loss passes it on to the hidden states. If the
model computes that loss, backward continues from the loss. If the loop computes it outside the model, backward cannot be
retried.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from holdall.attributes import Attributes
from holdall.errors import OverBudget
from holdall.runtime.activations.surroundings import autocast_state
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.budget.meter import Meter
from holdall.runtime.budget.oom_report import FlightRecorder, OomMoment
from holdall.runtime.head.lazy_logits import LazyLogits
from holdall.runtime.states.weights.slots import weights_of
from holdall.runtime.switching.replacements import Replacements, Tighten
from holdall.runtime.switching.snapshot import BufferSnapshots, RandomNumbers, Values
from holdall.types import Plan

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

OUT_OF_MEMORY = (torch.OutOfMemoryError, OverBudget)
_SMALL = 2**20  # bytes; gradients of smaller outputs are copied, larger ones would take memory that the plan uses


@dataclass(eq=False)
class _Forward:
    """The latest forward, until its backward is over."""

    args: Any
    kwargs: Any
    numbers: RandomNumbers
    buffers: Values
    attributes: Attributes  # those that a forward changes
    autocast: list[tuple[str, bool, torch.dtype]]
    inputs: list[tuple[torch.Tensor, int]]  # with their versions
    versions: list[int]  # versions of the weights
    arrived: dict[int, torch.Tensor | None] = field(default_factory=dict)  # output -> its gradient; None: too large to keep
    outputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    lazy: list[weakref.ref[LazyLogits]] = field(default_factory=list)  # outputs that receive no gradient
    loss_may_be_outside: bool = False  # their loss was not computed inside the model


class Repeat:
    """Wraps the model's forward, and every backward while the harness is on."""

    def __init__(self, harness: Harness, tighten: Tighten | None, recorder: FlightRecorder, meter: Meter) -> None:
        self._harness = harness
        self._meter = meter
        self.run: Callable[[Any, Any], Any] = lambda args, kwargs: harness.model.forward(*args, **kwargs)
        self.adopt: Callable[[Plan], None] = harness.adopt
        self._replacements = Replacements(tighten)
        self._recorder = recorder
        self._buffers = BufferSnapshots(harness.model, harness.quiet)
        self._known: list[torch.nn.Parameter] | None = None
        self._own: list[int] = []
        self._latest: _Forward | None = None
        self._is_inside = False

    def _weights(self) -> list[torch.nn.Parameter]:
        """The model's weights during a step; cached, since finding them takes longer than checking them."""
        if self._known is None or self._harness.engine is not None:
            self._known = weights_of(self._harness.model)
            self._own = list(map(id, self._known))
        return self._known

    def _owners(self) -> list[torch.nn.Parameter]:
        """Parameters whose `.grad` a backward of the model adds to."""
        engine = self._harness.engine
        return [*self._weights(), *(engine.others() if engine is not None else ())]

    def instead_of(self, plan: Plan) -> Plan:
        """The plan to begin a forward with: another if steps under this one ran out of memory."""
        return self._replacements.instead_of(plan, self._harness)

    # forward

    def forward(self, args: Any, kwargs: Any) -> Any:
        """The model's forward, retried if it runs out of memory."""
        if self._is_inside or not torch.is_grad_enabled():
            return self.run(args, kwargs)
        self._latest = None
        step = self._before(args, kwargs)
        try:
            out = self.run(args, kwargs)
        except OUT_OF_MEMORY as error:
            tighter = self._decide(error, step, "forward", self._lost(step))
            _forget(error)
        else:
            self._remember(step, out)
            return out
        # the frames of the first attempt, and with them its tensors, are freed here
        self._prepare(step, tighter)
        try:
            with self._inside():
                args, kwargs = self._begin(step)
                out = self.run(args, kwargs)
        except OUT_OF_MEMORY as error:
            self._recorder.add_to(error, self._harness, _moment("forward", step, _AGAIN))
            raise
        self._remember(step, out)
        return out

    def _before(self, args: Any, kwargs: Any) -> _Forward:
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        return _Forward(
            args=args,
            kwargs=kwargs,
            numbers=RandomNumbers(self._harness.device),
            buffers=self._buffers.take(),
            attributes=self._attributes(),
            autocast=autocast_state(leaves),
            inputs=[(t, t._version) for t in leaves],
            versions=[p._version for p in self._weights()],
        )

    def _remember(self, step: _Forward, out: Any) -> None:
        """Remember the model's outputs in the graph, without keeping it alive."""
        self._buffers.watch(step.buffers)
        self._latest = step
        for number, t in enumerate(_outputs(out)):
            if isinstance(t, LazyLogits):  # a hook would compute them whole
                step.lazy.append(weakref.ref(t))
                step.loss_may_be_outside |= not t.is_spent
                continue
            if t.grad_fn is None:
                continue
            step.outputs.append(weakref.ref(t))
            known: dict[str, Any] = t.grad_fn.metadata  # type: ignore[assignment]
            owner, places = known.get(_key(self), (None, {}))
            if owner is None or owner() is not step:
                known[_key(self)] = weakref.ref(step), (places := {})
            places[t.output_nr] = number
            t.register_hook(_arrival(step.arrived, number, self._harness.ledger))
        is_one_of_many = self._harness.plan.about.calls > 1  # a loss of several outputs cannot be continued from one
        is_unknown = not step.outputs and not step.lazy  # unknown output types: their backward would not be noticed
        if is_unknown or is_one_of_many:
            self._latest = None

    # backward

    def backward(self, original: Callable[..., None], tensors: Any, grad_tensors: Any, options: dict[str, Any]) -> None:
        """A backward of the loop; if it runs out of memory, it is finished from the model's outputs under a tighter plan."""
        step = self._latest
        if step is None or self._is_inside:
            original(tensors, grad_tensors, **options)
            return
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
        held = [(p, p.grad, p.grad._version) for p in self._owners() if p.grad is not None]
        engine = self._harness.engine
        was_empty = engine is None or not engine.held
        try:
            original(tensors, grad_tensors, **options)
        except OUT_OF_MEMORY as error:
            reason = self._lost(step) or _unusual(options) or self._not_undone(step, held, was_empty)
            found = _Seeds.find(roots, given, step, _key(self)) if not reason else None
            tighter = self._decide(error, step, "backward", reason or (found.reason if found is not None else ""))
            _forget(error)
        else:
            if step.arrived or not step.outputs:
                self._latest = None
            return
        assert found is not None
        self._let_go(roots, step)
        del tensors, roots
        self._drop_gradients(held)
        self._prepare_and_finish(original, step, found, tighter)

    def _prepare_and_finish(self, original: Callable[..., None], step: _Forward, seeds: _Seeds, tighter: Plan) -> None:
        numbers, buffers = RandomNumbers(self._harness.device), self._buffers.take()  # the loop's current state
        attributes = self._attributes()
        self._prepare(step, tighter)
        try:
            with self._inside(), contextlib.ExitStack() as stack, torch.enable_grad():
                for device, enabled, dtype in step.autocast:
                    stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype))
                args, kwargs = self._begin(step)
                leaves = _outputs(self.run(args, kwargs))
                stack.close()
                again = [leaves[n] for n in seeds.outputs]
                del leaves
                original(again, seeds.gradients)
        except OUT_OF_MEMORY as error:
            self._recorder.add_to(error, self._harness, _moment("backward", step, _AGAIN))
            raise
        finally:
            self._latest = None
        numbers.put_back()
        attributes.put_back()
        buffers.put_back()

    def _attributes(self) -> Attributes:
        return Attributes(self._harness.model, self._harness.plan.about.alters)

    def _let_go(self, roots: Sequence[torch.Tensor], step: _Forward) -> None:
        """Detach the loss and outputs that the loop holds, to free the graph of the first attempt."""
        for t in (*roots, *(reference() for reference in step.outputs)):
            if t is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be detached: if there is no room, the error is raised
                    t.detach_()
        for lazy in (reference() for reference in step.lazy):
            if lazy is not None:
                lazy.leave_graph()

    def _drop_gradients(self, held: list[tuple[torch.nn.Parameter, torch.Tensor, int]]) -> None:
        before = {id(p): grad for p, grad, _ in held}
        for p in self._owners():
            p.grad = before.get(id(p))
        engine = self._harness.engine
        if engine is not None:
            engine.forget_gradients()

    # shared by both

    def _prepare(self, step: _Forward, tighter: Plan) -> None:
        """Restore the state before the forward and install the tighter plan."""
        self._harness.abandon()
        step.attributes.put_back()
        step.buffers.put_back()
        step.numbers.put_back()
        self.adopt(tighter)
        gc.collect()  # frames of the first attempt may be in cycles and hold its tensors
        if self._harness.device.type == "cuda":
            torch.cuda.empty_cache()
        self._meter.forget_peak()  # the failed attempt is over

    def _begin(self, step: _Forward) -> tuple[Any, Any]:
        engine = self._harness.engine
        if engine is None:
            return step.args, step.kwargs
        begun: tuple[Any, Any] = engine.begin(step.args, step.kwargs)
        return begun

    def _decide(self, error: BaseException, step: _Forward, phase: str, reason: str) -> Plan:
        """The tighter plan to retry under; if there is none, or a reason against it, raises the error with that reason."""
        harness = self._harness
        plan = harness.plan
        tighter = None
        if not reason:
            tighter, reason = self._replacements.tightest(plan)
        if tighter is None:
            self._recorder.add_to(error, harness, _moment(phase, step, f"The step was not retried: {reason}"))
            raise error
        is_given_up = self._replacements.fail(plan, tighter, len(harness.all_peaks))
        self._recorder.write(error, harness, _moment(phase, step, f"The step is retried under {tighter.summary()}"))
        after = "; steps of this size keep it" if is_given_up else ""
        harness.note()(f"out of memory in {phase}: the step was retried under a tighter plan{after} ({tighter.summary()})")
        return tighter

    def _lost(self, step: _Forward) -> str:
        """Why the state before this forward cannot be restored; empty: it can."""
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            return "several processes train together, and one cannot retry a step alone"
        if self._harness.plan.about.once:
            return f"its forward cannot be undone: {self._harness.plan.about.once}"
        if step.buffers.lost():
            return f"the buffer `{step.buffers.lost()[0]}` was changed for the first time, so there is no copy of it"
        if self._buffers.is_stale or self._own != list(map(id, weights_of(self._harness.model))):
            return "parameters or buffers of the model were replaced"
        if any(t._version != version for t, version in step.inputs):
            return "an input was changed in place after the forward began"
        return ""

    def _not_undone(self, step: _Forward, held: list[tuple[torch.nn.Parameter, torch.Tensor, int]], was_empty: bool) -> str:
        engine = self._harness.engine
        updates = engine is not None and engine.when == "backward"
        if updates or (engine is None and step.versions != [p._version for p in self._weights()]):
            return "parameters were already updated in this backward"
        if not was_empty or any(p.grad is not grad or grad._version != version for p, grad, version in held):
            return "this backward has already added to gradients of an earlier one"
        if any(t.requires_grad for t, _ in step.inputs):
            return "an input of the model requires a gradient, so backward continues outside the model"
        return ""

    @contextlib.contextmanager
    def _inside(self) -> Any:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False


@dataclass
class _Seeds:
    """Where backward enters the model, and with which gradients."""

    outputs: list[int]
    gradients: list[torch.Tensor | None]
    reason: str = ""  # why backward cannot start there

    @staticmethod
    def find(roots: Sequence[torch.Tensor], given: Sequence[Any], step: _Forward, key: str) -> _Seeds:
        """Walk from the roots to the model's outputs; any other path to parameters rules a retry out."""
        entered: dict[int, None] = {}
        seen: set[tuple[Any, int]] = set()
        open_: list[tuple[Any, int]] = [(t.grad_fn, t.output_nr) for t in roots]
        while open_:
            edge = open_.pop()
            node, place = edge
            if node is None or edge in seen:
                continue
            seen.add(edge)
            owner, places = node.metadata.get(key, (None, {}))
            if owner is not None and owner() is step and place in places:
                entered[places[place]] = None
            elif node.name().endswith("AccumulateGrad"):
                return _Seeds([], [], _ROWS if step.loss_may_be_outside else _PAST)
            else:
                open_ += node.next_functions
        outputs = list(entered)
        if not outputs:
            return _Seeds([], [], "the loss does not come from the model's last forward")
        if len(roots) == 1 and len(outputs) == 1 and len(seen) == 1:  # the loss is the model's own output
            return _Seeds(outputs, [given[0]])
        missing = [n for n in outputs if step.arrived.get(n) is None]
        if missing:
            late = any(n not in step.arrived for n in missing)
            return _Seeds([], [], _ABOVE if late else _LARGE)
        return _Seeds(outputs, [step.arrived[n] for n in outputs])


_AGAIN = "The step was retried, and the tighter plan ran out of memory as well"
_PAST = "a part of the loss does not pass through the outputs of the model"
_ROWS = "the loss was computed outside the model, from its logits; let the model return its loss"
_ABOVE = "it ran out of memory in the backward of the loss, outside the model"
_LARGE = "the gradient of the model's output is too large to be kept for a retry; let the model return its loss"


def _moment(phase: str, step: _Forward, outcome: str) -> OomMoment:
    return OomMoment(phase=phase, batch=[list(t.shape) for t, _ in step.inputs], outcome=outcome)


def _outputs(out: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]


def _arrival(
    arrived: dict[int, torch.Tensor | None], number: int, ledger: Ledger | None
) -> Callable[[torch.Tensor | None], None]:
    """A hook that stores the gradient of an output; it must not refer to the model, which a loss may outlive."""

    def arrive(grad: torch.Tensor | None) -> None:
        if grad is None:  # the loss does not use this output, but one that the same node made
            return
        if grad.nbytes > _SMALL:
            arrived[number] = None
            return
        with ledger.paused() if ledger is not None else contextlib.nullcontext():
            arrived[number] = grad.detach().clone()

    return arrive


def _key(repeat: Repeat) -> str:
    return f"holdall.repeat.{id(repeat)}"


def _unusual(options: dict[str, Any]) -> str:
    """The option of a backward that cannot be retried: it keeps its graph, or writes elsewhere than `.grad`."""
    asked = [name for name in ("retain_graph", "create_graph", "inputs") if options.get(name)]
    return f"backward was called with `{asked[0]}`" if asked else ""


def _forget(error: BaseException | None) -> None:
    """Clear the frames of a failed attempt, which hold its tensors."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
