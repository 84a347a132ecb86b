"""A step that ran out of memory is made again under a tighter plan, once, with the same bits.

In forward: the model's own call is caught where it begins, what it changed is put back (random numbers, buffers), and it runs
again. In backward: the gradients that arrive at the model's outputs are known, so the gradients of this backward are dropped,
the forward runs again and backward goes on from its outputs.

The autograd graph of the first try has to go, or there would be no room for the second. The loop holds it by its loss and by
the model's outputs: those are detached in place. What a step cannot give back is found before anything is done, and then the
error goes on, with the reason: gradients of an earlier backward that were added to, parameters that were already updated, a
loss that reaches parameters past the model's outputs, several processes that train together.

Lazy logits (`lazy_logits.py`) are outputs that no gradient arrives at: their loss in rows passes it on to the hidden states.
If the model takes that loss itself, the loss is the output to begin from. If the loop takes it outside of the model, backward
cannot be made again.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdall.errors import HoldallError, OverBudget
from holdall.runtime.activations.recompute import _autocast_state
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.budget.oom_report import Moment, Recorder
from holdall.runtime.head.lazy_logits import LazyLogits
from holdall.runtime.switching.snapshot import Buffers, RandomNumbers, Values
from holdall.types import Plan

OUT_OF_MEMORY = (torch.OutOfMemoryError, OverBudget)
_SMALL = 2**20  # bytes of an output whose gradient is copied aside; keeping larger ones would take what the plan has given away
_TWICE = 2  # a plan that failed so often is not tried again

Tighten = Callable[[Plan], Plan | None]  # a plan with a smaller peak and the same placement of states; None: there is none


@dataclass(eq=False)
class _Forward:
    """The latest forward, until its backward is over."""

    args: Any
    kwargs: Any
    numbers: RandomNumbers
    buffers: Values
    autocast: list[tuple[str, bool, torch.dtype]]
    inputs: list[tuple[torch.Tensor, int]]  # with their versions
    versions: list[int]  # of the weights
    arrived: dict[int, torch.Tensor | None] = field(default_factory=dict)  # output -> its gradient; None: too large to keep
    outputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    lazy: list[weakref.ref[LazyLogits]] = field(default_factory=list)  # outputs that no gradient arrives at
    loss_may_be_outside: bool = False  # their loss was not taken inside of the model


class Repeat:
    """Stands around the model's forward, and around every backward while the harness is on."""

    def __init__(self, harness: Any, tighten: Tighten | None, recorder: Recorder) -> None:
        self._harness = harness
        self.run: Callable[[Any, Any], Any] = lambda args, kwargs: harness.model.forward(*args, **kwargs)
        self.adopt: Callable[[Plan], None] = harness.adopt
        self._tighten = tighten
        self._recorder = recorder
        self._buffers = Buffers(harness.model, harness.quiet)
        self._known: list[torch.nn.Parameter] | None = None
        self._own: list[int] = []
        self._latest: _Forward | None = None
        self._is_inside = False
        self._failures: dict[int, int] = {}  # by plan
        self._tighter: dict[int, tuple[Plan, Plan | None]] = {}  # by plan; the plan itself, so that its id stays its own

    def _weights(self) -> list[torch.nn.Parameter]:
        """Of the model, as they are during a step; looking for them takes longer than looking at them."""
        if self._known is None or self._harness.engine is not None:
            self._known = list(self._harness.model.parameters())
            self._own = list(map(id, self._known))
        return self._known

    def _owners(self) -> list[torch.nn.Parameter]:
        """Whoever has a `.grad` that a backward of the model adds to."""
        engine = self._harness.engine
        return [*self._weights(), *(engine.others() if engine is not None else ())]

    def instead_of(self, plan: Plan) -> Plan:
        """The plan to begin a step with: one that failed twice is not tried a third time."""
        tighter = self._tighter[id(plan)][1] if self._failures.get(id(plan), 0) >= _TWICE else None
        return tighter if tighter is not None else plan

    # forward

    def forward(self, args: Any, kwargs: Any) -> Any:
        """The model's forward, made again if it runs out of memory."""
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
        # the frames of the first try, and with them its tensors, are gone from here on
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
            autocast=_autocast_state(leaves),
            inputs=[(t, t._version) for t in leaves],
            versions=[p._version for p in self._weights()],
        )

    def _remember(self, step: _Forward, out: Any) -> None:
        """Know the model's outputs in the graph, without holding it."""
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
        is_one_of_many = self._harness.plan.about.get("calls", 1) > 1  # a loss of several cannot be gone back through from one
        is_unknown = not step.outputs and not step.lazy  # of a kind that is not looked into: its backward would not be noticed
        if is_unknown or is_one_of_many:
            self._latest = None

    # backward

    def backward(self, original: Callable[..., None], tensors: Any, grad_tensors: Any, options: dict[str, Any]) -> None:
        """A backward of the loop, finished from the model's outputs under a tighter plan if it runs out of memory."""
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
        numbers, buffers = RandomNumbers(self._harness.device), self._buffers.take()  # as the loop has them now
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
        buffers.put_back()

    def _let_go(self, roots: Sequence[torch.Tensor], step: _Forward) -> None:
        """The graph of the first try: whoever in the loop holds its loss or outputs shall not hold it."""
        for t in (*roots, *(reference() for reference in step.outputs)):
            if t is not None:
                with contextlib.suppress(RuntimeError):  # a view: then there may be no room, and the error goes on
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

    # what both do

    def _prepare(self, step: _Forward, tighter: Plan) -> None:
        """Everything as at the beginning of the forward, and the tighter plan on the model."""
        self._harness.abandon()
        step.buffers.put_back()
        step.numbers.put_back()
        self.adopt(tighter)
        gc.collect()  # frames of the first try may be in cycles, and hold its tensors
        if self._harness.device.type == "cuda":
            torch.cuda.empty_cache()

    def _begin(self, step: _Forward) -> tuple[Any, Any]:
        engine = self._harness.engine
        if engine is None:
            return step.args, step.kwargs
        begun: tuple[Any, Any] = engine.begin(step.args, step.kwargs)
        return begun

    def _decide(self, error: BaseException, step: _Forward, phase: str, reason: str) -> Plan:
        """The tighter plan to repeat under; where there is none, or a reason against it, the error is raised with it."""
        harness = self._harness
        plan = harness.plan
        tighter = None
        if not reason:
            tighter, reason = self._find_tighter(plan)
        if tighter is None:
            self._recorder.add_to(error, harness, _moment(phase, step, f"The step was not repeated: {reason}"))
            raise error
        self._failures[id(plan)] = count = self._failures.get(id(plan), 0) + 1
        self._recorder.write(error, harness, _moment(phase, step, f"The step is repeated under {tighter.summary()}"))
        after = "; steps of this size go on under it" if count >= _TWICE else ""
        harness.note()(f"out of memory in {phase}: the step was repeated under a tighter plan{after} ({tighter.summary()})")
        return tighter

    def _find_tighter(self, plan: Plan) -> tuple[Plan | None, str]:
        if self._tighten is None:
            return None, "this harness has no tighter plan to repeat it under"
        if id(plan) not in self._tighter:
            try:
                self._tighter[id(plan)] = plan, self._tighten(plan)
            except HoldallError as wrong:
                self._tighter[id(plan)] = plan, None
                return None, f"no tighter plan could be made: {wrong.fact}"
        found = self._tighter[id(plan)][1]
        return found, "" if found is not None else "there is no tighter plan than the one it ran under"

    def _lost(self, step: _Forward) -> str:
        """Why what was there before this forward cannot be had again; empty: it can."""
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            return "several processes train together, and one cannot repeat a step alone"
        if step.buffers.lost():
            return f"the buffer `{step.buffers.lost()[0]}` was changed for the first time, and there is no copy of it"
        if self._buffers.is_stale or self._own != list(map(id, self._harness.model.parameters())):
            return "parameters or buffers of the model were replaced by others"
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
            return "an input of the model wants a gradient, which goes on outside of it"
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
    reason: str = ""  # why it cannot be entered there again

    @staticmethod
    def find(roots: Sequence[torch.Tensor], given: Sequence[Any], step: _Forward, key: str) -> _Seeds:
        """Walk from the roots to the model's outputs; all that was reached otherwise speaks against a repetition."""
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
        if len(roots) == 1 and len(outputs) == 1 and len(seen) == 1:  # the loss is the model's own
            return _Seeds(outputs, [given[0]])
        missing = [n for n in outputs if step.arrived.get(n) is None]
        if missing:
            late = any(n not in step.arrived for n in missing)
            return _Seeds([], [], _ABOVE if late else _LARGE)
        return _Seeds(outputs, [step.arrived[n] for n in outputs])


_AGAIN = "The step was repeated, and the tighter plan ran out as well"
_PAST = "a part of the loss does not pass through the outputs of the model"
_ROWS = "the loss of the model's logits was taken outside of the model; let the model return its loss"
_ABOVE = "it ran out in the backward of the loss, outside of the model"
_LARGE = "the gradient of the model's output is too large to be kept for a repetition; let the model return its loss"


def _moment(phase: str, step: _Forward, outcome: str) -> Moment:
    return Moment(phase=phase, batch=[list(t.shape) for t, _ in step.inputs], outcome=outcome)


def _outputs(out: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]


def _arrival(arrived: dict[int, torch.Tensor | None], number: int, ledger: Ledger | None) -> Callable[[torch.Tensor], None]:
    """A hook that writes down the gradient of an output; knows no model, which a loss may outlive."""

    def arrive(grad: torch.Tensor) -> None:
        if grad.nbytes > _SMALL:
            arrived[number] = None
            return
        with ledger.paused() if ledger is not None else contextlib.nullcontext():
            arrived[number] = grad.detach().clone()

    return arrive


def _key(repeat: Repeat) -> str:
    return f"holdall.repeat.{id(repeat)}"


def _unusual(options: dict[str, Any]) -> str:
    """Backwards that are not made again: their graph is used once more, or goes to other places than `.grad`."""
    asked = [name for name in ("retain_graph", "create_graph", "inputs") if options.get(name)]
    return f"backward was called with `{asked[0]}`" if asked else ""


def _forget(error: BaseException | None) -> None:
    """Frames hold the tensors of a try that failed."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
