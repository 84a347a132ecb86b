"""Runs a plan's placement of model states: streams weights, offloads gradients, and makes the optimizer's updates.

One step:

    forward    working weights replace the masters in the modules; a block waits for its unit's update and weights
    backward   streamed weights are fetched again; when the last gradient of a unit is there, it is copied to the host
               (or kept on the device, or used by an update at once)
    step()     the user's optimizer has nothing left to do: the engine makes the updates, at once ("step"), overlapping
               the next forward ("overlap_forward"), or has already made them ("backward")

Between backward and `step()` every master has a `.grad`; where that is not a plain tensor, it is a `Gradient`.
Code that touches a master whose update is still running waits for it.

The engine creates the units, receives the hooks, and calls its parts in order:

    weights/streaming.py        streamed weights                evaluation.py                forwards without gradients
    gradients/collector.py      gradients until their update    updating/speculative.py      begun before the loop can clip
    updating/optimizer_step.py  updates when they are due       updating/weights_first.py    whose weights are computed first
    updating/pending.py         updates that are running        updating/in_stretches.py     of states on a disk
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from holdall.errors import Unsupported
from holdall.runtime.patching import put_method
from holdall.runtime.states.evaluation import Evaluating
from holdall.runtime.states.gradients.clipping import watch_clipping
from holdall.runtime.states.gradients.collector import Collector
from holdall.runtime.states.gradients.entry import GradEntry
from holdall.runtime.states.guard import watch_calls
from holdall.runtime.states.placement import Placing, check_placeable
from holdall.runtime.states.putting_back import put_units_back
from holdall.runtime.states.torn import before_saving
from holdall.runtime.states.unit import HOST, Member, PlacedUnit, at_home, find_members
from holdall.runtime.states.updating.in_stretches import InStretches
from holdall.runtime.states.updating.optimizer_step import BACKWARD, OVERLAP_FORWARD, STEP, Stepping
from holdall.runtime.states.updating.out_of_place import OutOfPlaceUpdate
from holdall.runtime.states.updating.pending import Pending
from holdall.runtime.states.updating.speculative import Ahead
from holdall.runtime.states.updating.updater import Updater
from holdall.runtime.states.updating.via_device import UpdateViaDevice
from holdall.runtime.states.weights.cache import Lender
from holdall.runtime.states.weights.slots import WeightReads, put_slots
from holdall.runtime.states.weights.streaming import Streaming
from holdall.tiers._keepers import Keepers
from holdall.types import Progress
from holdall.types.plan import silent
from holdall.updates.parts import snapshot


class Engine:
    """Owns the units of a model while a harness is on."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        placing: Placing,
        *,
        store: Keepers | None,
        device: torch.device,
        calls: Sequence[str] = (),
        tell: Callable[[torch.UntypedStorage], None] = lambda _: None,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
        progress: Progress = silent,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.store = store
        self.device = device
        self.when = placing.when if optimizer is not None else STEP
        self.is_swapped = False  # modules hold the working weights
        self._release = placing.release  # block call whose forward frees the device memory for updates via device
        self._undo: list[Callable[[], object]] = []
        self._queued = False  # a callback at the end of this backward is queued
        self.is_half_made = False  # a backward has begun to make its updates, and did not end
        self.away: set[int] = set()  # storages on the host, which the device's byte count leaves out
        self.updater = Updater(optimizer, store, device, quiet=quiet, away=self.away) if optimizer is not None else None
        self._passing = UpdateViaDevice(self.updater) if self.updater is not None else None
        self._stretched = (
            InStretches(self.updater, stretch=placing.stretch, buffers=placing.buffers) if self.updater is not None else None
        )
        check_placeable(model, optimizer)
        self._reads = WeightReads(self._bring, self._catch_up)
        self._take_slots_off = put_slots(model, self._reads)
        try:
            self.units = self._find_units(placing)
            self._set_up(share=placing.share)
        except BaseException:
            self._take_slots_off()
            raise
        self._move_buffers()
        self._left: dict[str, int] = {u.name: u.expected for u in self.units}  # gradients still to arrive per unit
        early = calls if placing.overlap else ()  # without overlap, weights are fetched when they are needed
        self.streaming = Streaming(model, self.units, early, store=store, device=device, tell=tell, prefetch=placing.prefetch)
        self._evaluating = Evaluating(self, self.streaming)
        self._pending = Pending(self.units, device, self.settle)
        is_beside = placing.ahead and self.when == OVERLAP_FORWARD  # host memory for out-of-place updates is planned
        self._beside = beside = OutOfPlaceUpdate(self.updater) if self.updater is not None else None
        ahead = Ahead(beside, optimizer, is_on=is_beside) if beside is not None and optimizer is not None else None
        self.were_ahead: list[bool] = ahead.were_right if ahead is not None else []
        self._collector = Collector(
            store, device, are_used_up=self.when == BACKWARD, overlap=placing.overlap, ahead=ahead, quiet=quiet
        )
        self._stepping: Stepping | None = None
        if self.updater is not None and self._passing is not None and beside is not None and ahead is not None:
            assert self._stretched is not None
            self._stepping = Stepping(
                self.units,
                self.updater,
                self._passing,
                self._collector,
                self._pending,
                beside,
                ahead,
                self._stretched,
                when=self.when,
                slots=placing.slots,
                weights_first=is_beside,
            )
        if is_beside and beside is not None:
            beside.reserve(self.units, progress)
        self._undo += [watch_calls(self), watch_clipping(self._pending)]
        self._working = {id(m.master): m.working for u in self.units for m in u.members if m.is_swapped}
        self._standing_for = self.masters()
        self._install(calls)
        self._pending.watch()

    # setting up and taking down

    def _find_units(self, placing: Placing) -> list[PlacedUnit]:
        optimizer = self.optimizer
        trained = {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer is not None else None
        units: list[PlacedUnit] = []
        for placement in placing.units:
            own = {id(p) for p in self.model.parameters()} if trained is None else trained
            members = list(find_members(self.model, placement.params, own))
            units.append(PlacedUnit(placement, members, device=self.device, dtype=placing.dtype))
        return units

    def _set_up(self, *, share: bool) -> None:
        into_store = self.device.type == "cpu"
        if self.store is not None:  # refused before anything is moved, if it is too much
            asked = Counter[str]()
            for unit in self.units:
                asked.update(unit.far_bytes(into_store=into_store, share=share))
            if self._stretched is not None:
                asked.update(self._stretched.far_bytes(self.units))
            for tier, nbytes in asked.items():
                self.store.free(self.store.reserve(nbytes, pinned=False, tier=tier))
        try:
            for unit in self.units:
                self._set_up_unit(unit, into_store=into_store, share=share)
            if self._stretched is not None:
                self._stretched.adopt(self.units)
        except BaseException:  # not enough memory: undo everything
            put_units_back(self.units, self.store, stretched=self._stretched)
            raise
        self.away |= {m.master.untyped_storage()._cdata for u in self.units for m in u.members if not u.keeps(m)}

    def _set_up_unit(self, unit: PlacedUnit, *, into_store: bool, share: bool) -> None:
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
            self._hear(unit)
        add = self._undo.append
        if self.optimizer is not None:
            add(self.optimizer.register_step_pre_hook(self._before_step).remove)
            add(self.optimizer.register_step_post_hook(self._after_step).remove)
            add(self.optimizer.register_state_dict_pre_hook(lambda _: before_saving(self, self.settle)).remove)
            add(self.optimizer.register_load_state_dict_post_hook(lambda _: self._states_loaded()).remove)
        add(put_method(self.model, "zero_grad", self._zero_grad))
        for module in self.model.modules():
            if isinstance(module, torch.nn.RNNBase):  # it would move its weights out of the memory that is fetched into
                add(put_method(module, "flatten_parameters", lambda: None))
        self._undo += self._evaluating.watch(self.model, calls)
        add(self.model.register_state_dict_pre_hook(lambda *_: before_saving(self, self.rest)).remove)
        add(self.model.register_load_state_dict_pre_hook(lambda *_: self.rest()).remove)
        add(self.model.register_load_state_dict_post_hook(lambda *_: self.refresh()).remove)

    def _hear(self, unit: PlacedUnit) -> None:
        """Register hooks for gradients of working copies; the loop may unfreeze more parameters later."""
        for m in unit.members:
            if m.is_swapped and m.working.requires_grad and not m.is_heard:
                m.is_heard = True
                hook = self._hook(unit) if m.trained else self._other_hook(m)
                self._undo.append(m.working.register_post_accumulate_grad_hook(hook).remove)

    def close(self) -> None:
        """Restore everything, even after an error; then raise the error."""
        try:
            self.rest()
        finally:
            self._pending.guard.retire()
            self._take_down()

    def _take_down(self) -> None:
        kept = self._collector.unused(self.units)
        self.streaming.release_all()
        self._swap(False)
        if self._passing is not None:
            self._passing.leave_room()
        if self.updater is not None:
            self.updater.close()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._take_slots_off()
        put_units_back(self.units, self.store, self.updater, self._stretched, self._beside)
        if self._beside is not None:
            self._beside.free_spares()
        for master, grad in kept:
            master.grad = grad.to(master.device)
        self.units.clear()
        self._collector.close()
        self._stepping = self._beside = self._passing = self._stretched = self.updater = None

    # forward

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A forward begins: give modules the working weights and move inputs to the device."""
        self._pending.guard.lower()
        self._reads.turn += 1
        if self._queued:  # the previous backward failed half way
            self._queued = self.is_half_made = False
            self._left = {u.name: u.expected for u in self.units}
            for unit in self.units:
                for m in unit.trained:
                    if m.is_swapped:
                        m.working.grad = None
        self._evaluating.begin(args, kwargs)
        reads_masters = self._stepping is not None and self._stepping.reads_masters
        if reads_masters or self._collector.held:  # no step since the backward: weights may have to be copied again
            self._pending.finish_all()
        self._collector.make_way()
        self._swap(True)
        move = tree_map_only(torch.Tensor, self._here, (args, kwargs))
        return move[0], move[1]

    def _here(self, t: torch.Tensor) -> torch.Tensor:
        return t if t.device.type == self.device.type else t.to(self.device, non_blocking=True)

    def need(self, call: str) -> None:
        """Before the forward of this block call: make its weights available and prefetch the next call's."""
        if call == self._release and self._passing is not None:
            self._passing.leave_room()
        if not self.is_swapped:
            self._pending.guard.lower()
            self._reads.turn += 1
            self._swap(True)
        self._evaluating.look()
        for unit in self.streaming.used_by(call):
            self._bring(unit)
        for follower in self.streaming.after.get(call, ()):
            self._make_new(follower)
            self.streaming.fetch(follower)

    def _bring(self, unit: PlacedUnit) -> None:
        """Make the unit's latest weights available on the device before they are read."""
        self._make_new(unit)
        self.streaming.arrive(unit)
        unit.check()
        unit.turn = self._reads.turn

    def _catch_up(self, unit: PlacedUnit) -> None:
        """Code iterates over the unit's weights, maybe without reading them: wait, but fetch nothing."""
        self._make_new(unit)
        self.streaming.wait_if_coming(unit)

    def _make_new(self, unit: PlacedUnit) -> None:
        """Bring the working weights up to date with the masters: after their update and after writes by the loop."""
        self._pending.finish(unit)
        if unit.needs_working and unit.was_written():
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # copies from host memory may still be running
            unit.copy_from_homes(self.store)

    def leave(self, call: str) -> None:
        """After the forward of this block call: free streamed weights that are not needed before backward."""
        for unit in self.streaming.used_by(call):
            self._evaluating.leave(unit)

    def end_forward(self, *, failed: bool = False) -> None:
        """After a forward: if no backward can follow, give modules the masters back."""
        if torch.is_grad_enabled() and not failed:
            self.watch()
            return
        kept = self._evaluating.end(failed=failed)
        self.streaming.release_all(kept)
        self._swap(False)
        self.watch()

    def stop_watching(self) -> None:
        """Ignore accesses to the model until `watch`: they are not the loop's."""
        self._pending.guard.lower()

    def watch(self) -> None:
        """The loop continues: make it wait if it reads a master whose update is not finished."""
        if self.is_swapped:  # a backward will follow
            if self.optimizer is not None and (self._pending.count_late() or self._pending.are_some):
                self._pending.raise_guard(self.optimizer)
        elif self.optimizer is not None:
            self._pending.raise_guard(self.optimizer)
        else:
            self._pending.watch()

    # backward

    def before_backward(self) -> None:
        self._pending.guard.lower()  # the guard would inspect every op
        if self._collector.held and not self.is_swapped:  # a retained graph is used again
            self._collector.make_way()

    def after_backward(self) -> None:
        self.watch()

    def after_grad(self, inputs: Sequence[Any]) -> None:
        """After `torch.autograd.grad`: if it was for parameters, the loop will put the gradients into the masters."""
        if any(id(t) in self._standing_for for t in inputs):
            self.streaming.release_all()
            self._swap(False)
        self.watch()

    def _hook(self, unit: PlacedUnit) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            self._queue_end()
            self._left[unit.name] -= 1
            if self._left[unit.name] == 0:
                self._gradient_ready(unit)

        return arrived

    def _other_hook(self, member: Member) -> Callable[[torch.Tensor], None]:
        """A hook for parameters that this optimizer does not train, or did not when the plan was applied."""

        def arrived(_: torch.Tensor) -> None:
            self._queue_end()
            member.hand_over()

        return arrived

    def _queue_end(self) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _gradient_ready(self, unit: PlacedUnit) -> None:
        which = tuple(n for n, m in enumerate(unit.trained) if m.working.grad is not None)
        self._left[unit.name] = unit.expected
        if not which:
            return
        grads = [unit.trained[n].working.grad for n in which]
        for n in which:
            unit.trained[n].working.grad = None
        if unit.is_whole:
            self.streaming.release(unit)  # a unit with frozen members may still be needed by earlier blocks
        held = self._collector.collect(unit, which, grads)  # type: ignore[arg-type]
        if self.when == BACKWARD:
            assert self.optimizer is not None and self._stepping is not None
            self.is_half_made = True
            self._stepping.update(held, snapshot(self.optimizer), None)

    def _end_backward(self) -> None:
        for unit in self.units:  # units with unused parameters are still incomplete
            if 0 < self._left[unit.name] < unit.expected:
                self._gradient_ready(unit)
        self._queued = self.is_half_made = False
        self._collector.let_go()
        self.streaming.release_all()
        self._swap(False)
        self._collector.send_norms()
        self._collector.show()

    # step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise Unsupported(
                "`optimizer.step(closure)` cannot run under this plan", hint="run forward and backward, then `optimizer.step()`"
            )
        self._pending.guard.lower()
        for unit in self.units:
            for m in unit.members:
                if m.is_swapped:
                    m.hand_over(instead=True)  # the loop has put it there
        self._swap(False)
        self.streaming.release_all()  # weights cached for evaluations will be stale
        assert self._stepping is not None
        self._stepping.before(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        assert self._stepping is not None
        self._stepping.after(optimizer)

    # may be called at any time

    def settle(self) -> None:
        """Finish every update, also on the host; raise their errors after all have finished."""
        self._pending.finish_all()
        if self._passing is not None:
            self._passing.leave_room()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._pending.guard.calm()

    def rest(self) -> None:
        """Finish everything that is running and give modules the masters back."""
        self.settle()
        self.streaming.release_all()
        self._swap(False)

    def refresh(self) -> None:
        """The masters were changed from outside: copy them to the working weights."""
        self._pending.finish_all()
        for unit in self.units:
            unit.copy_from_homes(self.store)
            unit.end_update()  # whatever its outcome
            unit.turn = -1

    def forget_gradients(self) -> None:
        """Drop the gradients of a backward that will be repeated with the same weights."""
        self._collector.forget()
        self.refresh()  # gradients may have overwritten the host copy of streamed weights

    def _states_loaded(self) -> None:
        """The optimizer has loaded new states: copy those on the host into their buffers."""
        self.settle()
        if self._passing is not None:
            self._passing.refill_chunks(self.units, self._stretched)

    def work_of(self, tensor: Any) -> Any:
        """The working copy that currently replaces a parameter; any other tensor is returned as it is."""
        return self._working.get(id(tensor), tensor) if self.is_swapped else tensor

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """`model.zero_grad()` between forward and backward: clear the masters' gradients."""
        was_swapped = self.is_swapped
        self._swap(False)
        type(self.model).zero_grad(self.model, set_to_none)
        self._swap(was_swapped)

    def masters(self) -> dict[int, torch.nn.Parameter]:
        """id of a working copy -> the master parameter that it stands for."""
        return {id(m.working): m.master for u in self.units for m in u.members if m.is_swapped}

    def others(self) -> list[torch.nn.Parameter]:
        """Masters with working copies that this optimizer does not train."""
        return [m.master for u in self.units for m in u.members if m.is_swapped and not m.trained]

    def _swap(self, working: bool) -> None:
        if working == self.is_swapped:
            return
        if working:
            for unit in self.units:
                unit.check_slots()
        self.is_swapped = working
        for unit in self.units:
            if working:
                if unit.swap_in():
                    self._hear(unit)
                    self._left[unit.name] = unit.expected
            else:
                unit.swap_out()

    # locations

    @property
    def held(self) -> dict[str, GradEntry]:
        """Gradients that no step has used yet, by unit."""
        return self._collector.held

    @property
    def lender(self) -> Lender | None:
        """The cache of streamed weights for evaluations."""
        return self._evaluating.lender

    @lender.setter
    def lender(self, lender: Lender | None) -> None:
        self._evaluating.lender = lender

    def tensors(self) -> list[torch.Tensor]:
        """The engine's tensors on the device: working weights, and masters and states that are updated there."""
        found = [u.flat for u in self.units if u.flat is not None]
        for unit in self.units:
            if unit.stays:
                found += [m.master for m in unit.members if unit.keeps(m)]
                if self.updater is not None:
                    states = self.updater.states(unit.trained)
                    found += [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        return found

    def storages(self) -> list[torch.UntypedStorage]:
        """Device memory that holds parameters, so that it is not counted as activations."""
        found = [u.flat.untyped_storage() for u in self.units if u.flat is not None]
        found += [m.master.untyped_storage() for u in self.units for m in u.members if not u.needs_working]
        return found

    @property
    def outside(self) -> int:
        """Bytes of masters and states in ordinary (not the store's) host memory."""
        there = [u for u in self.units if u.update == HOST and u.masters is None] if self.device.type == "cuda" else []
        masters = sum(m.master.nbytes for u in there for m in at_home(u))
        return masters + (self.updater.outside if self.updater is not None else 0)
