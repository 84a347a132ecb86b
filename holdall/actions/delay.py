"""Delay: host updates use gradients that are one step old, so that each update has the time of a whole step.

The delayed parameter update of ZeRO-Offload (Ren et al., USENIX ATC 2021). After `warmup` ordinary steps:

    step i        forward and backward with weights that contain the gradients up to i - 2
    overlapping   the host updates its masters with the gradients of i - 1
    step() of i   waits for that update, copies the new weights to the device, keeps the gradients of i for the next step

Not exact, and so never chosen unless asked for. Reading parameters during an update gives a mix of old and new values;
`state_dict` waits for the update, and so contains every gradient.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.errors import Unsupported
from holdall.types import Copy, Facts, Kind, Phase, Problem, Run, Schedule, Step, Trace

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from holdall.runtime.harness import Harness
    from holdall.runtime.states.engine import Engine
    from holdall.runtime.states.unit import PlacedUnit

_HANDLING = 0.4  # of an update's time: copying gradients (6 bytes per parameter) and casting new weights (6), of Adam's 28


@dataclass(frozen=True, kw_only=True)
class Delay(Facts):
    warmup: int = 40  # ordinary steps before it begins

    name: ClassVar[str] = "delay"
    exact: ClassVar[bool] = False
    rank: ClassVar[int] = 40  # after `place`, whose updates it moves

    @staticmethod
    def samples(trace: Trace) -> list[Delay]:
        return [Delay(warmup=1)] if trace.units else []

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        """A step after the warm-up: updates move from its end to its beginning and read delayed gradients."""
        trace, far = problem.trace, problem.hardware.far
        end = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops)) - 1
        if far is None or not any(_is_update(s) for s in schedule.after.get(end, ())):
            return schedule
        if any(isinstance(step, Copy) and step.nbytes for step in schedule.after[end]):
            raise Unsupported("updates of states that lie on a disk cannot be delayed", hint="leave `states` of `place` empty")
        schedule = schedule.copy()
        units = {f"update of {u.name}": u for u in trace.units}
        late: dict[int, int] = {}  # gradient buffer -> the buffer of delayed gradients
        moved: list[Run] = []
        left: list[Step] = []
        for step in schedule.after[end]:
            if isinstance(step, Run) and _is_update(step):
                unit = units[step.name]
                like = trace.tensors[unit.grads[0]]
                held = schedule.add(like, name=f"{unit.name}: held back", kind=Kind.GRAD, nbytes=4 * unit.numel, born=-1)
                schedule.start[held] = far.name
                late.update(dict.fromkeys(step.mutates, held))
                moved.append(replace(step, mutates=(held,)))
            elif isinstance(step, Copy) and step.src == far.name:
                uses = tuple(dict.fromkeys(late[x] for x in step.tensors if x in late))
                left.append(replace(step, uses=(*step.uses, *uses)))
            else:
                left.append(step)
        handling = _HANDLING * sum(run.seconds for run in moved)
        schedule.after[end] = [Run(op=-1, reads=(), writes=(), seconds=handling, name="hold gradients back"), *left]
        schedule.insert(-1, moved, first=True)
        return schedule

    def install(self, harness: Harness) -> None:
        if harness.optimizer is None:
            return
        late = _Late(harness, self.warmup)
        handles = [
            harness.optimizer.register_step_pre_hook(late.before_step),  # before the engine's, which is made later
            harness.optimizer.register_state_dict_pre_hook(lambda *_: late.settle()),
            harness.optimizer.register_load_state_dict_pre_hook(lambda *_: late.settle()),
            harness.model.register_state_dict_pre_hook(lambda *_: late.settle()),
            harness.model.register_load_state_dict_pre_hook(lambda *_: late.settle()),
        ]
        for handle in handles:
            harness.on_close(handle.remove)
        harness.on_close(late.settle)


def _is_update(step: Step) -> bool:
    return isinstance(step, Run) and step.stream == "host"


class _Late:
    """Holds one step's gradients of the units updated on the host, while the next step overlaps their update."""

    def __init__(self, harness: Harness, warmup: int) -> None:
        self._harness = harness
        self._warmup = warmup
        self._steps = 0
        self._pending: Future[None] | None = None  # future of the update that is running
        self._is_new = False  # the masters are newer than the device's weights
        self._nbytes = 0  # bytes of the delayed gradients, in the host's pageable memory

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        from holdall.updates.parts import snapshot

        engine = self._harness.engine
        self._steps += 1
        if engine is None or engine.updater is None or self._steps <= self._warmup:
            return
        updater = engine.updater
        if engine.when != "step":
            raise Unsupported(
                f"`delay` needs updates at the step, but this plan makes them at {engine.when!r}", hint='place with when="step"'
            )
        self.settle()
        if self._is_new:
            engine.refresh()
        jobs = [self._take(engine, unit) for unit in engine.units if unit.update == "host" and unit.name in engine.held]
        for unit, _, _ in jobs:
            unit.follows = False  # the device's weights are one step behind, on purpose
        groups = snapshot(optimizer)

        def update() -> None:
            for unit, which, grads in jobs:
                members = [unit.trained[n] for n in which]
                states = updater.states(members)
                is_first = not any(states)
                updater.part(unit).update([m.master.detach() for m in members], grads, states, groups, which)
                for m, state in zip(members, states, strict=True):
                    optimizer.state[m.master] = state
                    if is_first:
                        updater.outside += sum(getattr(v, "nbytes", 0) for v in state.values())

        self._is_new = bool(jobs)
        held = sum(g.nbytes for _, _, grads in jobs for g in grads)
        updater.outside += held - self._nbytes
        self._nbytes = held
        if jobs:
            self._pending = updater.submit(update)

    def _take(self, engine: Engine, unit: PlacedUnit) -> tuple[PlacedUnit, list[int], list[torch.Tensor]]:
        """Take a unit's gradients as the loop has left them, and hide them from the engine."""
        from holdall.runtime.states.gradients.offloaded import Gradient

        held = engine.held[unit.name]
        which, grads = [], []
        with self._quiet():
            for n in held.which:
                grad = unit.trained[n].master.grad
                if grad is not None:
                    which.append(n)
                    grads.append(grad.value() if isinstance(grad, Gradient) else grad.clone())
                    unit.trained[n].master.grad = None  # else the engine would use it in this step
        del engine.held[unit.name]
        if held.sum is not None and engine.store is not None:
            engine.store.free(held.sum)
        return unit, which, grads

    def _quiet(self) -> AbstractContextManager[Any]:
        """Leave host memory out of the budget, even where host and device share one RAM."""
        ledger = self._harness.ledger
        return ledger.paused() if ledger is not None else nullcontext()

    def settle(self) -> None:
        """Apply every delayed gradient to the parameters."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
