"""Model states under a plan: weights come and go, gradients leave, updates happen where and when the plan says.

One step, as the engine sees it:

    forward    working weights take the homes' places in the modules; a unit's forward waits for its update and its weights
    backward   streamed weights come back; when a unit's last gradient is there, it leaves the device (or stays, or is used up)
    step()     the user's optimizer finds nothing to do; the engine makes the updates, at once ("step"), or beside the next
               forward ("spill"), or has made them already ("backward")

Between backward and `step()` every home has a `.grad`; where that is not a plain tensor, it is a `Gradient`. Whoever touches a
home whose update is still under way waits for it.

The engine sets the units up, hears of all this by hooks, and says in which order its parts do their work:

    streaming.py    weights that come and go         evaluating.py      forwards without gradients, and memory lent to weights
    collecting.py   gradients, until their update    ahead.py           updates begun before the loop can clip
    stepping.py     updates, when they are due       weights_first.py   updates whose weights are wanted before the rest of them
    pending.py      updates that are under way
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
from holdall.runtime.states.grad_entry import GradEntry
from holdall.runtime.states.grad_store import Collector
from holdall.runtime.states.guard import watch_calls
from holdall.runtime.states.optimizer_step import BACKWARD, SPILL, STEP, Stepping
from holdall.runtime.states.pending import Pending
from holdall.runtime.states.placement import Placing
from holdall.runtime.states.unit import HOST, Member, PlacedUnit, find_members
from holdall.runtime.states.update_out_of_place import OutOfPlaceUpdate
from holdall.runtime.states.update_speculative import Ahead
from holdall.runtime.states.update_through_device import UpdateViaDevice
from holdall.runtime.states.updates import Updater
from holdall.runtime.states.weight_cache import Lender
from holdall.runtime.states.weight_slots import Reads, put_slots
from holdall.runtime.states.weight_streaming import Streaming
from holdall.tiers._keepers import Keepers
from holdall.types import Progress
from holdall.types.plan import silent
from holdall.updates.parts import is_separable, snapshot


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
        self._release = placing.release  # the block call at whose forward the memory that updates pass through is given back
        self._undo: list[Callable[[], object]] = []
        self._queued = False  # a callback at the end of this backward
        self.away: set[int] = set()  # storages in another tier, which whoever counts the device's memory leaves out
        self.updater = Updater(optimizer, store, device, quiet=quiet, away=self.away) if optimizer is not None else None
        self._passing = UpdateViaDevice(self.updater) if self.updater is not None else None
        _check(model, optimizer)
        self._reads = Reads(self._bring, self._catch_up)
        self._take_slots_off = put_slots(model, self._reads)
        try:
            self.units = self._find_units(placing)
            self._set_up(share=placing.share)
        except BaseException:
            self._take_slots_off()
            raise
        self._move_buffers()
        self._left: dict[str, int] = {u.name: u.expected for u in self.units}  # gradients that are still to come
        early = calls if placing.overlap else ()  # else weights set out when they are needed
        self.streaming = Streaming(model, self.units, early, store=store, device=device, tell=tell)
        self._evaluating = Evaluating(self, self.streaming)
        self._pending = Pending(self.units, device, self.settle)
        is_beside = placing.ahead and self.when == SPILL  # there is room for values beside the old ones
        self._beside = beside = OutOfPlaceUpdate(self.updater) if self.updater is not None else None
        ahead = Ahead(beside, optimizer, is_on=is_beside) if beside is not None and optimizer is not None else None
        self.were_ahead: list[bool] = ahead.were_right if ahead is not None else []
        self._collector = Collector(
            store, device, are_used_up=self.when == BACKWARD, overlap=placing.overlap, ahead=ahead, quiet=quiet
        )
        self._stepping: Stepping | None = None
        if self.updater is not None and self._passing is not None and beside is not None and ahead is not None:
            self._stepping = Stepping(
                self.units,
                self.updater,
                self._passing,
                self._collector,
                self._pending,
                beside,
                ahead,
                when=self.when,
                slots=placing.slots,
                weights_first=is_beside,
            )
        if is_beside and beside is not None:
            beside.reserve(self.units, progress)
        self._undo.append(watch_calls(self))
        self._works = {id(m.home): m.work for u in self.units for m in u.members if m.is_swapped}
        self._standing_for = self.homes()
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
            for tier, nbytes in asked.items():
                self.store.free(self.store.reserve(nbytes, pinned=False, tier=tier))
        try:
            for unit in self.units:
                self._set_up_unit(unit, into_store=into_store, share=share)
        except BaseException:  # no room for all of it: as if nothing had been moved
            for unit in self.units:
                unit.put_back(self.store, in_store=False)
            raise
        self.away |= {m.home.untyped_storage()._cdata for u in self.units for m in u.members if not u.keeps(m)}

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
            add(self.optimizer.register_state_dict_pre_hook(lambda _: self.settle()).remove)
            add(self.optimizer.register_load_state_dict_post_hook(lambda _: self._states_loaded()).remove)
        add(put_method(self.model, "zero_grad", self._zero_grad))
        self._undo += self._evaluating.watch(self.model, calls)
        add(self.model.register_state_dict_pre_hook(lambda *_: self.rest()).remove)
        add(self.model.register_load_state_dict_pre_hook(lambda *_: self.rest()).remove)
        add(self.model.register_load_state_dict_post_hook(lambda *_: self.refresh()).remove)

    def _hear(self, unit: PlacedUnit) -> None:
        """Of the gradients of working copies; the loop may want those of others later on."""
        for m in unit.members:
            if m.is_swapped and m.work.requires_grad and not m.is_heard:
                m.is_heard = True
                hook = self._hook(unit) if m.trained else self._other_hook(m)
                self._undo.append(m.work.register_post_accumulate_grad_hook(hook).remove)

    def close(self) -> None:
        """Everything as it was, whatever happens; then whatever happened is said."""
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
        for unit in self.units:
            if self.updater is not None:
                self.updater.return_states(unit)
            has_moved = self._beside is not None and self._beside.has_moved(unit)
            unit.put_back(self.store, in_store=has_moved)
        if self._beside is not None:
            self._beside.free_spares()
        for home, grad in kept:
            home.grad = grad.to(home.device)
        self.units.clear()
        self._collector.close()
        self._stepping = self._beside = self._passing = self.updater = None

    # forward

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A forward begins: modules get the working weights, and inputs are on the device."""
        self._pending.guard.lower()
        self._reads.turn += 1
        if self._queued:  # a backward that failed half way
            self._queued = False
            self._left = {u.name: u.expected for u in self.units}
            for unit in self.units:
                for m in unit.trained:
                    if m.is_swapped:
                        m.work.grad = None
        self._evaluating.begin(args, kwargs)
        reads_homes = self._stepping is not None and self._stepping.reads_homes
        if reads_homes or self._collector.held:  # no step since the backward: weights may have to be made from the homes again
            self._pending.finish_all()
        self._collector.make_way()
        self._swap(True)
        move = tree_map_only(torch.Tensor, self._here, (args, kwargs))
        return move[0], move[1]

    def _here(self, t: torch.Tensor) -> torch.Tensor:
        return t if t.device.type == self.device.type else t.to(self.device, non_blocking=True)

    def need(self, call: str) -> None:
        """The forward of this block call begins: its weights must be there, the next one's may set out."""
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
        """Whoever reads the unit's weights finds those of the last update, on the device."""
        self._make_new(unit)
        self.streaming.arrive(unit)
        unit.check()
        unit.turn = self._reads.turn

    def _catch_up(self, unit: PlacedUnit) -> None:
        """Somebody walks over the unit's weights, which need not mean that he reads them."""
        self._make_new(unit)
        self.streaming.wait_if_coming(unit)

    def _make_new(self, unit: PlacedUnit) -> None:
        """The working weights are those of the homes: after their update, and after what the loop itself wrote into them."""
        self._pending.finish(unit)
        if unit.needs_work and unit.was_written():
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # what lies on the host may still be on its way from there
            unit.copy_from_homes(self.store)

    def leave(self, call: str) -> None:
        """The forward of this block call is over: streamed weights that nobody needs before backward go."""
        for unit in self.streaming.used_by(call):
            self._evaluating.leave(unit)

    def end_forward(self, *, failed: bool = False) -> None:
        """Without a backward to come, the homes return at once."""
        if torch.is_grad_enabled() and not failed:
            self.watch()
            return
        kept = self._evaluating.end(failed=failed)
        self.streaming.release_all(kept)
        self._swap(False)
        self.watch()

    def stop_watching(self) -> None:
        """What happens to the model until `watch` is not the loop's doing."""
        self._pending.guard.lower()

    def watch(self) -> None:
        """The loop goes on by itself: should it read a home whose update has not come to its end, it waits."""
        if self.is_swapped:  # a backward is to come
            if self.optimizer is not None and (self._pending.count_late() or self._pending.are_some):
                self._pending.raise_guard(self.optimizer)
        elif self.optimizer is not None:
            self._pending.raise_guard(self.optimizer)
        else:
            self._pending.watch()

    # backward

    def before_backward(self) -> None:
        self._pending.guard.lower()  # it would look at every op
        if self._collector.held and not self.is_swapped:  # a graph that was kept is used again
            self._collector.make_way()

    def after_backward(self) -> None:
        self.watch()

    def after_grad(self, inputs: Sequence[Any]) -> None:
        """The loop has asked for gradients by itself. Where they are of parameters, it will put them into the homes."""
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
        """For parameters that this optimizer does not train, or did not when the plan was applied."""

        def arrived(_: torch.Tensor) -> None:
            self._queue_end()
            member.hand_over()

        return arrived

    def _queue_end(self) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _gradient_ready(self, unit: PlacedUnit) -> None:
        which = tuple(n for n, m in enumerate(unit.trained) if m.work.grad is not None)
        self._left[unit.name] = unit.expected
        if not which:
            return
        grads = [unit.trained[n].work.grad for n in which]
        for n in which:
            unit.trained[n].work.grad = None
        if unit.is_whole:
            self.streaming.release(unit)  # frozen ones may still be needed for what comes before
        held = self._collector.collect(unit, which, grads)  # type: ignore[arg-type]
        if self.when == BACKWARD:
            assert self.optimizer is not None and self._stepping is not None
            self._stepping.update(held, snapshot(self.optimizer), None)

    def _end_backward(self) -> None:
        self._queued = False
        for unit in self.units:  # parameters that were not used leave their unit unfinished
            if 0 < self._left[unit.name] < unit.expected:
                self._gradient_ready(unit)
        self._collector.let_go()
        self.streaming.release_all()
        self._swap(False)
        self._collector.send_norms()
        self._collector.show()

    # step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise Unsupported("a closure would run the model inside the step", hint="run forward and backward before the step")
        self._pending.guard.lower()
        for unit in self.units:
            for m in unit.members:
                if m.is_swapped:
                    m.hand_over(instead=True)  # the loop has put it there
        self._swap(False)
        self.streaming.release_all()  # weights that an evaluation kept will be old
        assert self._stepping is not None
        self._stepping.before(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        assert self._stepping is not None
        self._stepping.after(optimizer)

    # what others may want of it at any time

    def settle(self) -> None:
        """Every update is over, on the host too; an error in one of them is raised when all are."""
        self._pending.finish_all()
        if self._passing is not None:
            self._passing.leave_room()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._pending.guard.calm()

    def rest(self) -> None:
        """Everything that is under way comes to its end, and modules hold the homes."""
        self.settle()
        self.streaming.release_all()
        self._swap(False)

    def refresh(self) -> None:
        """The homes were changed from outside: working weights follow."""
        self._pending.finish_all()
        for unit in self.units:
            unit.copy_from_homes(self.store)
            unit.end_update()  # whatever became of it
            unit.turn = -1

    def forget_gradients(self) -> None:
        """The backward that they came from will be made again, from the weights as they are."""
        self._collector.forget()
        self.refresh()  # gradients may have taken the place of weights that come and go

    def _states_loaded(self) -> None:
        """The optimizer has new states: those on the host move into their places again."""
        self.settle()
        if self._passing is not None:
            self._passing.refill_chunks(self.units)

    def work_of(self, tensor: Any) -> Any:
        """The working copy that modules use in the place of a parameter now; anything else is itself."""
        return self._works.get(id(tensor), tensor) if self.is_swapped else tensor

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """`model.zero_grad()` between forward and backward: it is the homes that have gradients."""
        was_swapped = self.is_swapped
        self._swap(False)
        type(self.model).zero_grad(self.model, set_to_none)
        self._swap(was_swapped)

    def homes(self) -> dict[int, torch.nn.Parameter]:
        """Working copies, by `id`, and the parameters that they stand for."""
        return {id(m.work): m.home for u in self.units for m in u.members if m.is_swapped}

    def others(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradients come to them by way of working copies, and which this optimizer does not train."""
        return [m.home for u in self.units for m in u.members if m.is_swapped and not m.trained]

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

    # what is where

    @property
    def held(self) -> dict[str, GradEntry]:
        """Gradients that no step has used yet, by unit."""
        return self._collector.held

    @property
    def lender(self) -> Lender | None:
        """Of memory to weights, in evaluations."""
        return self._evaluating.lender

    @lender.setter
    def lender(self, lender: Lender | None) -> None:
        self._evaluating.lender = lender

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


def _check(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """What the engine could not do justice to is refused."""
    if optimizer is not None and not is_separable(optimizer):
        raise Unsupported(
            f"{type(optimizer).__name__} looks at all parameters at once, so its update cannot be taken apart",
            hint="use an optimizer that updates each parameter by itself, or a plan without `place`",
        )
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise Unsupported(
                f"`{name}` has gradient hooks of its own, which would not see its gradient any more",
                hint="remove the hooks, or plan without `place`",
            )
