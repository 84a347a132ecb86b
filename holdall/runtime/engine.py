"""Model states under a plan: weights come and go, gradients leave, updates happen where and when the plan says.

One step, as the engine sees it:

    forward    working weights take the homes' places in the modules; a unit's forward waits for its update and its weights
    backward   streamed weights come back; when a unit's last gradient is there, it leaves the device (or stays, or is used up)
    step()     the user's optimizer finds nothing to do; the engine makes the updates, at once ("step"), or beside the next
               forward ("spill"), or has made them already ("backward")

Between backward and `step()` every home has a `.grad`; where that is not a plain tensor, it is a `Gradient`. Whoever touches a
home whose update is still under way waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from holdall.errors import Unsupported
from holdall.optim._part import Groups, is_separable, snapshot
from holdall.runtime.gradients import Gradient
from holdall.runtime.guard import Guard
from holdall.runtime.held import Held
from holdall.runtime.lending import Lender
from holdall.runtime.streaming import Streaming
from holdall.runtime.units import DEVICE, HOST, THROUGH, Placement, Unit, find_members
from holdall.runtime.updating import Order, Updater
from holdall.tiers import Keeper

BACKWARD, SPILL, STEP = "backward", "spill", "step"


class Engine:
    """Owns the units of a model while a harness is on."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        placements: Sequence[Placement],
        *,
        store: Keeper | None,
        device: torch.device,
        dtype: torch.dtype | None,
        when: str,
        slots: int = 2,
        share: bool = True,
        ahead: bool = False,
        release: str = "",
        calls: Sequence[str] = (),
        tell: Callable[[torch.UntypedStorage], None] = lambda _: None,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.store = store
        self.device = device
        self.when = when if optimizer is not None else STEP
        self.slots = slots
        self.ahead = ahead  # begin updates on the host before it is known whether gradients are clipped
        self._is_plain = False  # the last step used its gradients as they were, so the next one may begin its updates ahead
        self._tried = self._right = 0  # updates begun ahead in this step, and those of them that were asked for
        self.were_ahead: list[bool] = []  # step by step: what was begun ahead is what the loop asked for
        self.release = release  # the block call at whose forward the memory that updates pass through is given back
        self._quiet = quiet
        self._undo: list[Callable[[], object]] = []
        self._is_swapped = False
        self._entered: torch.nn.Module | None = None  # by which an evaluation came that the model itself was not called for
        self._queued = False  # a callback at the end of this backward
        self._leaving: list[Held] = []
        self.away: set[int] = set()  # storages in another tier, which whoever counts the device's memory leaves out
        self.updater = Updater(optimizer, store, device, quiet=quiet, away=self.away) if optimizer is not None else None
        trained = {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer is not None else None
        self._check(optimizer)
        self.units: list[Unit] = []
        for placement in placements:
            own = {id(p) for p in model.parameters()} if trained is None else trained
            members = list(find_members(model, placement.params, own))
            self.units.append(Unit(placement, members, device=device, dtype=dtype))
        if store is not None:  # refused before anything is moved, if it is too much
            into_store = device.type == "cpu"
            store.free(store.reserve(sum(u.far_bytes(into_store=into_store, share=share) for u in self.units), pinned=False))
        try:
            for unit in self.units:
                self._set_up(unit, share)
        except BaseException:  # no room for all of it: as if nothing had been moved
            for unit in self.units:
                unit.put_back(store, in_store=False)
            raise
        self.away |= {m.home.untyped_storage()._cdata for u in self.units for m in u.members if not u.keeps(m)}
        self._move_buffers()
        self.held: dict[str, Held] = {}
        self._left: dict[str, int] = {u.name: len(u.trained) for u in self.units}
        self._pending: dict[str, Any] = {}  # unit -> future or event of its update
        self.streaming = Streaming(model, self.units, calls, store=store, device=device, tell=tell)
        self.lender: Lender | None = None  # of memory to weights, in evaluations; the harness knows what there is
        self._norms: torch.Tensor | None = None  # pinned
        self._homes: set[int] = set()  # storages of homes whose update is under way
        self._aside: list[list[torch.Tensor]] = []
        self._guard = Guard(self.settle_home)
        self._install(calls)

    # setting up and taking down

    def _check(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and not is_separable(optimizer):
            raise Unsupported(
                f"{type(optimizer).__name__} looks at all parameters at once, so its update cannot be taken apart",
                hint="use an optimizer that updates each parameter by itself, or a plan without `place`",
            )
        for name, p in self.model.named_parameters():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise Unsupported(
                    f"`{name}` has gradient hooks of its own, which would not see its gradient any more",
                    hint="remove the hooks, or plan without `place`",
                )

    def _set_up(self, unit: Unit, share: bool) -> None:
        into_store = self.device.type == "cpu"
        unit.settle_homes(self.store, into_store=into_store)
        unit.make_work()
        if self.store is not None:
            unit.make_buffers(self.store, share=share)
        if unit.is_streamed:
            unit.resize(False)
        if self.updater is not None:
            self.updater.take(unit)

    def _move_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != self.device.type:
                    module._buffers[name] = buffer.to(self.device)

                    def undo(slots: dict[str, Any] = module._buffers, name: str = name, was: torch.Tensor = buffer) -> None:
                        was.copy_(slots[name])
                        slots[name] = was

                    self._undo.append(undo)

    def _install(self, calls: Sequence[str]) -> None:
        for unit in self.units:
            for m in unit.trained:
                if m.is_swapped:
                    handle = m.work.register_post_accumulate_grad_hook(self._hook(unit))
                    self._undo.append(handle.remove)
        add = self._undo.append
        if self.optimizer is not None:
            add(self.optimizer.register_step_pre_hook(self._before_step).remove)
            add(self.optimizer.register_step_post_hook(self._after_step).remove)
            add(self.optimizer.register_state_dict_pre_hook(lambda _: self.settle()).remove)
            add(self.optimizer.register_load_state_dict_post_hook(lambda _: self._states_loaded()).remove)
        for module in _holders(self.model, calls):
            add(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True).remove)
            add(module.register_forward_hook(self._exit, always_call=True).remove)
        add(self.model.register_state_dict_pre_hook(lambda *_: self._rest()).remove)
        add(self.model.register_load_state_dict_pre_hook(lambda *_: self._rest()).remove)
        add(self.model.register_load_state_dict_post_hook(lambda *_: self.refresh()).remove)

    def _hook(self, unit: Unit) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            self._queue_end()
            self._left[unit.name] -= 1
            if self._left[unit.name] == 0:
                self._gradient_ready(unit)

        return arrived

    def close(self) -> None:
        """Everything as it was, whatever happens; then whatever happened is said."""
        try:
            self._rest()
        finally:
            self._take_down()

    def _take_down(self) -> None:
        kept = self._left_gradients()
        self.streaming.release_all()
        self._swap(False)
        if self.updater is not None:
            self.updater.leave_room()
            self.updater.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        for unit in self.units:
            if self.updater is not None:
                self.updater.return_states(unit)
            has_spare = self.updater is not None and self.updater.has_spare(unit)
            unit.put_back(self.store, in_store=has_spare)
        if self.updater is not None:
            self.updater.free_spares()
        for home, grad in kept:
            home.grad = grad.to(home.device)
        self.units, self.held, self.updater = [], {}, None

    def _left_gradients(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Gradients that no step has used yet, as plain tensors: the loop may go on without us."""
        found = []
        for held in self.held.values():
            for n in held.which:
                home = held.unit.trained[n].home
                if isinstance(home.grad, Gradient) and not home.grad.spent:
                    found.append((home, home.grad.value()))
        return found

    # forward

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A forward begins: modules get the working weights, and inputs are on the device."""
        self._guard.lower()
        if self._queued:  # a backward that failed half way
            self._queued = False
            self._left = {u.name: len(u.trained) for u in self.units}
            for unit in self.units:
                for m in unit.trained:
                    if m.is_swapped:
                        m.work.grad = None
        if self.lender is not None:
            self.lender.begin(args, kwargs)
        self._restore_weights()
        self._swap(True)
        move = tree_map_only(torch.Tensor, self._here, (args, kwargs))
        return move[0], move[1]

    def _restore_weights(self) -> None:
        """Where gradients took the place of weights and no step followed, the weights come back: a forward needs them."""
        for held in list(self.held.values()):
            unit = held.unit
            if not unit.is_streamed or unit.source is not unit.buffer or held.sum is not None:
                continue
            if held.attempt is not None and held.attempt.done is not None:
                held.attempt.done.result()  # it reads what will be overwritten
            if all(_is_cleared(unit.trained[n].home.grad) for n in held.which):
                self._drop(held)
            else:
                self._widen(held)
            unit.copy_from_homes(self.store)

    def _here(self, t: torch.Tensor) -> torch.Tensor:
        return t if t.device.type == self.device.type else t.to(self.device, non_blocking=True)

    def end_forward(self, *, failed: bool = False) -> None:
        """Without a backward to come, the homes return at once."""
        if torch.is_grad_enabled() and not failed:
            return
        kept: list[Unit] = []
        if self.lender is not None and not failed:
            self.lender.end()
            kept = self.lender.lent
        self.streaming.release_all(kept)
        self._swap(False)

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A module that holds blocks is called by itself, as by PEFT's `generate`: that is an evaluation, too."""
        if torch.is_grad_enabled() or self._is_swapped:
            return None
        self._entered = module
        return self.begin(args, kwargs)

    def _exit(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._entered is module:
            self._entered = None
            self.end_forward(failed=output is None)

    def need(self, call: str) -> None:
        """The forward of this block call begins: its weights must be there, the next one's may set out."""
        if call == self.release and self.updater is not None:
            self.updater.leave_room()
        if not self._is_swapped:
            self._guard.lower()
            self._swap(True)
        if self.lender is not None:
            self.lender.look()
        for unit in self.streaming.used_by(call):
            self._make_new(unit)
            self.streaming.arrive(unit)
        for follower in self.streaming.after.get(call, ()):
            self._make_new(follower)
            self.streaming.fetch(follower)

    def _make_new(self, unit: Unit) -> None:
        """The working weights are those of the homes: after their update, and after what the loop itself wrote into them."""
        self._finish_update(unit)
        if unit.needs_work and unit.was_written():
            unit.copy_from_homes(self.store)

    def leave(self, call: str) -> None:
        """The forward of this block call is over: streamed weights that nobody needs before backward go."""
        for unit in self.streaming.used_by(call):
            if self.lender is not None:
                self.lender.leave(unit)
            else:
                self.streaming.release(unit)

    # gradients

    def _queue_end(self) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _gradient_ready(self, unit: Unit) -> None:
        which = tuple(n for n, m in enumerate(unit.trained) if m.work.grad is not None)
        self._left[unit.name] = len(unit.trained)
        if not which:
            return
        grads = [unit.trained[n].work.grad for n in which]
        for n in which:
            unit.trained[n].work.grad = None
        if len(unit.trained) == len(unit.members):
            self.streaming.release(unit)  # frozen ones may still be needed for what comes before
        held = self.held.get(unit.name)
        if held is not None and all(_is_cleared(unit.trained[n].home.grad) for n in held.which):
            self._drop(held)  # the loop cleared its gradients instead of stepping
            held = None
        if held is None:
            held = self.held[unit.name] = Held(unit, self.store)
            held.which = which
            self._hold(held, grads)  # type: ignore[arg-type]
            self._try_ahead(held)
        else:
            self._add(held, which, grads)  # type: ignore[arg-type]
        if self.when == BACKWARD:
            assert self.optimizer is not None
            self._update(held, snapshot(self.optimizer), None)

    def _hold(self, held: Held, grads: list[torch.Tensor]) -> None:
        if self.when != BACKWARD:
            held.norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32 if held.unit.is_narrow else None))
        if held.unit.update == DEVICE:
            held.here = grads
        else:
            self._send(held, grads)

    def _try_ahead(self, held: Held) -> None:
        """Begin the update in the hope that the loop will not clip, where it did not in the step before."""
        if not self.ahead or held.unit.update != HOST or self.updater is None or self.when != SPILL:
            return
        if not self._is_plain:
            return
        assert self.optimizer is not None
        held.attempt = self.updater.attempt(held.unit, snapshot(self.optimizer), held.which, held.on_host)

    def _is_right(self, held: Held, order: Order) -> bool:
        """Whether what was begun ahead is what the loop asks for now."""
        attempt = held.attempt
        if attempt is None or held.sum is not None or attempt.which != order.which:
            return False
        plain = all(not isinstance(v, torch.Tensor) for g in (*attempt.groups, *order.groups) for v in g.values())
        return plain and attempt.groups == order.groups and (order.scale is None or float(order.scale) == 1.0)

    def _send(self, held: Held, grads: list[torch.Tensor]) -> None:
        """Gather the gradients and let them leave; those sent before are let go first, so that one set is on the way."""
        assert self.store is not None
        self._let_go()
        unit = held.unit
        held.flat = torch.empty(unit.grads.nbytes, dtype=torch.uint8, device=self.device)
        views = unit.grads.views(held.flat)
        torch._foreach_copy_([views[n] for n in held.which], grads)
        grads.clear()
        assert unit.buffer is not None
        self.store.push(unit.buffer, held.flat)
        self._leaving.append(held)

    def _let_go(self) -> None:
        for held in self._leaving:
            assert self.store is not None and held.unit.buffer is not None
            self.store.wait(held.unit.buffer)
            held.flat = None
        self._leaving = []

    def _drop(self, held: Held) -> None:
        if held.sum is not None and self.store is not None:
            self.store.free(held.sum)
        del self.held[held.unit.name]

    def _add(self, held: Held, which: tuple[int, ...], grads: list[torch.Tensor]) -> None:
        """Another backward before the update: gradients are added up in the homes' precision."""
        unit = held.unit
        if which != held.which:
            raise Unsupported(
                f"`{unit.name}` got gradients for other parameters than in the backward before",
                hint="step the optimizer after every backward, or plan without `place`",
            )
        grad_of = [unit.trained[n].home.grad for n in which]
        if any(not isinstance(g, Gradient) or g.here is not None or g.factor is not None for g in grad_of):
            raise Unsupported(
                f"the gradient of `{unit.name}` was changed between two backwards of one step",
                hint="change gradients after the last backward, or plan without `place`",
            )
        held.norms = None
        if held.attempt is not None and held.attempt.done is not None:
            held.attempt.done.result()  # it reads the buffer that the next gradient goes to
            held.attempt, self.ahead = None, False
        if unit.update == DEVICE:
            homes = [unit.trained[n].home for n in which]
            held.here = [h.to(p.dtype) for h, p in zip(held.here, homes, strict=True)]
            torch._foreach_add_(held.here, [g.to(p.dtype) for g, p in zip(grads, homes, strict=True)])
            held.norms = torch.stack(torch._foreach_norm(held.here, 2))
            return
        if unit.source is unit.buffer and unit.is_streamed:
            raise Unsupported(
                "a second backward came before the step, but the plan lets gradients take the place of weights",
                hint="plan with `accumulate=` as many backwards as the loop makes per step",
            )
        assert self.store is not None and unit.buffer is not None
        layout = unit.wide
        with self._quiet():
            if held.sum is None:
                self._widen(held)
            self._send(held, grads)
            self.store.arrived(unit.buffer)
            assert held.sum is not None
            views = layout.views(self.store.memory(held.sum))
            new = unit.grads.views(self.store.memory(unit.buffer))
            for n in which:
                views[n].add_(new[n])

    def _widen(self, held: Held) -> None:
        """The gradients move out of their buffer, as wide as the homes."""
        assert self.store is not None
        layout = held.unit.wide
        with self._quiet():
            first = held.on_host()
            held.sum = self.store.reserve(layout.nbytes, pinned=False)
            views = layout.views(self.store.memory(held.sum))
            torch._foreach_copy_([views[n] for n in held.which], first)

    def _end_backward(self) -> None:
        self._queued = False
        for unit in self.units:  # parameters that were not used leave their unit unfinished
            if 0 < self._left[unit.name] < len(unit.trained):
                self._gradient_ready(unit)
        self._let_go()
        self.streaming.release_all()
        self._swap(False)
        self._send_norms()
        for held in self.held.values():
            for n in held.which:
                home = held.unit.trained[n].home
                grad = home.grad
                if _is_cleared(grad):
                    grad = None
                if grad is not None and (not isinstance(grad, Gradient) or grad.source is not held):
                    raise Unsupported(
                        "gradients of the step before were not cleared, so this backward would add to them",
                        hint="call `optimizer.zero_grad()` after every step, or plan without `place`",
                    )
                if grad is None:
                    grad = home.grad = Gradient(home, held, n)
                assert isinstance(grad, Gradient)
                grad.renew()
                if self.when == BACKWARD:
                    grad.spent = "it was used up in backward, because the loop was said not to clip"
        if self.when == BACKWARD:
            self.held = {}

    def _send_norms(self) -> None:
        """All norms to the host in one copy, so that whoever clips waits once."""
        known = [h for h in self.held.values() if h.norms is not None]
        if self.device.type != "cuda" or not known:
            return
        every = torch.cat([h.norms for h in known])  # type: ignore[misc]
        if self._norms is None or self._norms.numel() < every.numel():
            self._norms = torch.empty(every.numel(), dtype=every.dtype, pin_memory=True)
        host = self._norms[: every.numel()]
        host.copy_(every, non_blocking=True)
        event = torch.cuda.current_stream(self.device).record_event()
        for held, part in zip(known, host.split([len(h.which) for h in known]), strict=True):
            held.host_norms, held.norms_event = part, event

    # updates

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise Unsupported("a closure would run the model inside the step", hint="run forward and backward before the step")
        self._swap(False)
        self.streaming.release_all()  # weights that an evaluation kept will be old
        groups = snapshot(optimizer)
        is_skipped = self._unscale(optimizer)
        if self.when != BACKWARD and not is_skipped:
            held, self.held = self.held, {}
            self._tried = self._right = 0
            self._is_plain = True
            self._prepare_room(held.values())
            for unit in self.units:
                if unit.name in held:
                    self._update(held[unit.name], groups, self._asked(held[unit.name]))
                    self._spend(held[unit.name])
                elif any(isinstance(m.home.grad, Gradient) and m.home.grad.spent for m in unit.trained):
                    raise Unsupported(
                        f"a second step without a backward: the gradient of `{unit.name}` was used by the first",
                        hint="step once after every backward, and clear gradients in between",
                    )
            self.were_ahead.append(0 < self._tried == self._right)
        self._aside = [group["params"] for group in optimizer.param_groups]
        placed = {id(m.home) for u in self.units for m in u.trained if u.needs_work}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in placed]

    def _unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """What a GradScaler leaves to fused optimizers: its scale, and whether a gradient is not finite; true: do nothing."""
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if scale is not None and self.when == BACKWARD:
            raise Unsupported(
                "gradients were used up in backward, before their scale was taken out of them",
                hint="plan with `clips=True` where the loop has a GradScaler",
            )
        if found is not None and found.item():
            return True
        if scale is None:
            return False
        inverse = scale.reciprocal() if torch.frexp(scale).mantissa == 0.5 else None  # of a power of two: exact
        for held in self.held.values():
            for n in held.which:
                grad = held.unit.trained[n].home.grad
                if isinstance(grad, Gradient) and inverse is not None:
                    grad.times(inverse)
                elif isinstance(grad, Gradient):
                    grad.value().div_(scale)
        return False

    def _spend(self, held: Held) -> None:
        """What held the gradient is the update's now; whoever still wants it is told so."""
        for m in held.unit.trained:
            if isinstance(m.home.grad, Gradient):
                m.home.grad.spent = "the step has used it"
                m.home.grad.here = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        for group, params in zip(optimizer.param_groups, self._aside, strict=True):
            group["params"] = params
        pending = [m for u in self.units if u.name in self._pending for m in u.trained]
        self._homes = {m.home.untyped_storage()._cdata for m in pending}
        for m in pending:
            values = optimizer.state.get(m.home, {}).values()
            self._homes |= {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
        if self._pending:
            self._guard.rise()

    def _asked(self, held: Held) -> torch.Tensor | None:
        """What the loop did to the gradients: the factor, if it is the same for all; else they are replaced."""
        grads = [held.unit.trained[n].home.grad for n in held.which]
        kept = [n for n, g in zip(held.which, grads, strict=True) if g is not None]
        if any(not isinstance(g, Gradient) or g.source is not held or g.here is not None for g in grads) or len(kept) < len(
            grads
        ):
            self._replace(held, kept)
            return None
        factors = [g.factor for g in grads]  # type: ignore[union-attr]
        first: torch.Tensor | None = factors[0]
        if all(f is first for f in factors):
            return first
        self._replace(held, kept)
        return None

    def _replace(self, held: Held, kept: list[int]) -> None:
        """The gradients as the loop left them take the place of those that were held."""
        unit = held.unit
        values = {}
        for n in kept:
            grad = unit.trained[n].home.grad
            assert grad is not None
            values[n] = grad.value() if isinstance(grad, Gradient) else grad
        held.which = tuple(kept)
        held.norms = None
        if not kept:
            return
        if unit.update == DEVICE:
            held.here = [values[n].to(self.device) for n in kept]
            return
        assert self.store is not None
        layout = unit.wide
        if held.sum is None:
            held.sum = self.store.reserve(layout.nbytes, pinned=False)
        with self._quiet():
            views = layout.views(self.store.memory(held.sum))
            for n in kept:
                views[n].copy_(values[n])

    def _prepare_room(self, held: Iterable[Held]) -> None:
        """Memory for the units that pass through the device, from here until they all have."""
        if self.updater is None:
            return
        passing = [h for h in held if h.unit.update == THROUGH and self.updater.adopt(h.unit)]
        if passing and self.device.type == "cuda":
            self.updater.room(max(self.updater.through_bytes(h.unit, h.layout) for h in passing), min(self.slots, len(passing)))

    def _update(self, held: Held, groups: Groups, scale: torch.Tensor | None) -> None:
        """Make the update, or have it made."""
        assert self.updater is not None
        unit, updater = held.unit, self.updater
        if not held.which:
            return
        after = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        order = Order(groups, held.which, scale, after)
        if unit.update == DEVICE:
            updater.on_device(unit, order, held.here)
            held.here = []
            unit.note_versions()
        elif unit.update == THROUGH and updater.adopt(unit):
            self._pass_through(held, order)
        else:
            is_right = self._is_right(held, order)
            self._tried += held.attempt is not None
            self._right += is_right
            is_vain = held.attempt is not None and not is_right
            self._is_plain &= not is_vain and held.sum is None and (scale is None or float(scale) == 1.0)

            def job() -> Any:
                return self._on_host(held, order, is_right)

            is_first = not all(updater.states([unit.trained[n] for n in held.which]))
            if self.when == STEP or (is_first and self.when == SPILL):  # a first step makes states, which whoever looks expects
                self._pending[unit.name] = job()
                self._finish_update(unit)
            else:
                self._pending[unit.name] = updater.submit(job)

    def _on_host(self, held: Held, order: Order, is_right: bool) -> Any:
        assert self.updater is not None and self.store is not None
        if held.attempt is not None and is_right:
            return self.updater.accept(held.unit, held.attempt, order)
        event = self.updater.on_host(held.unit, order, held.on_host())
        if held.sum is not None:
            self.store.free(held.sum)
            held.sum = None
        return event

    def _pass_through(self, held: Held, order: Order) -> None:
        assert self.updater is not None and self.store is not None
        inline = self.device.type != "cuda"
        if inline:
            self.updater.room(self.updater.through_bytes(held.unit, held.layout), 1)
        self._pending[held.unit.name] = self.updater.through(held.unit, order, held.ticket, held.layout)
        if inline:
            self.updater.leave_room()
            self._finish_update(held.unit)
        if held.sum is not None:
            self.store.free(held.sum)
            held.sum = None

    def _finish_update(self, unit: Unit) -> None:
        """From here on the unit's new weights may be used."""
        if unit.name not in self._pending:
            return
        pending = self._pending.pop(unit.name)
        event = pending.result() if hasattr(pending, "result") else pending
        unit.note_versions()
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        """Every update is over, on the host too; an error in one of them is raised when all are."""
        wrong: Exception | None = None
        for unit in self.units:
            try:
                self._finish_update(unit)
            except Exception as error:  # of the user's optimizer, or for want of memory
                wrong = wrong or error
        self._guard.lower()
        if wrong is not None:
            raise wrong
        if self.updater is not None:
            self.updater.leave_room()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._guard.lower()

    def settle_home(self, key: int) -> None:
        """If the update of whoever owns this storage is under way, it comes to its end."""
        if key in self._homes:
            self._homes = set()
            self.settle()

    def refresh(self) -> None:
        """The homes were changed from outside: working weights follow."""
        for unit in self.units:
            unit.copy_from_homes(self.store)

    def _states_loaded(self) -> None:
        """The optimizer has new states: those on the host move into their places again."""
        self.settle()
        if self.updater is not None:
            self.updater.refill_chunks(self.units)

    def _rest(self) -> None:
        """Everything that is under way comes to its end, and modules hold the homes."""
        self.settle()
        self.streaming.release_all()
        self._swap(False)

    def _swap(self, working: bool) -> None:
        if working == self._is_swapped:
            return
        self._is_swapped = working
        for unit in self.units:
            if working:
                unit.swap_in()
            else:
                unit.swap_out()

    # what is where

    def tensors(self) -> list[torch.Tensor]:
        """What the engine holds on the device: working weights, and homes and states that are updated there."""
        found = [u.flat for u in self.units if u.flat is not None]
        for unit in self.units:
            if unit.stays:
                found += [m.home for m in unit.members if unit.keeps(m)]
                if self.updater is not None:
                    states = self.updater.states(unit.trained)
                    found += [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        return found

    def storages(self) -> list[torch.UntypedStorage]:
        """Device memory that holds parameters, so that nobody mistakes it for activations."""
        found = [u.flat.untyped_storage() for u in self.units if u.flat is not None]
        found += [m.home.untyped_storage() for u in self.units for m in u.members if not u.needs_work]
        return found

    @property
    def outside(self) -> int:
        """Bytes of homes and states that lie in the host's ordinary memory."""
        homes = (
            sum(m.home.nbytes for u in self.units if u.update == HOST and u.homes is None for m in u.members)
            if self.device.type == "cuda"
            else 0
        )
        return homes + (self.updater.outside if self.updater is not None else 0)


def _holders(model: torch.nn.Module, calls: Iterable[str]) -> list[torch.nn.Module]:
    """The modules between the model and its blocks."""
    modules = dict(model.named_modules())
    paths = {".".join(parts[:n]) for parts in (c.partition("#")[0].split(".") for c in calls) for n in range(1, len(parts))}
    return [modules[path] for path in sorted(paths) if path in modules]


def _is_cleared(grad: torch.Tensor | None) -> bool:
    return grad is None or (isinstance(grad, Gradient) and grad.is_cleared)
