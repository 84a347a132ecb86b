"""Updates of units, on the device or concurrently on the host; `via_device.py` has those via the device.

Each is the user's own optimizer over the unit's parameters (`updates/parts.py`); they differ in where it runs and in what is
copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdall.runtime.states.unit import DEVICE, Member, PlacedUnit
from holdall.tiers._buffers import copy_tensor
from holdall.tiers._chaos import late_job
from holdall.tiers._keepers import Keepers
from holdall.updates import host_adam
from holdall.updates.parts import Groups, Part, snapshot


@dataclass(frozen=True, slots=True)
class Order:
    """One update to make, with hyperparameters and factor as they were at `step()`."""

    groups: Groups
    which: tuple[int, ...]  # indices of the trained members that have a gradient
    scale: torch.Tensor | None
    after: Any  # event after which the working weights may be overwritten


class Updater:
    """Makes updates. `quiet`: a context whose host memory is not counted as device memory."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Keepers | None,
        device: torch.device,
        *,
        quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
        away: set[int] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.store = store
        self.device = device
        self.lane = store.lane() if store is not None else None
        self.back = store.lane() if store is not None else None  # so that new weights do not queue behind states
        self.quiet = quiet
        self.away = away if away is not None else set()  # storages on the host
        self._threads = host_adam.host_threads(device)
        self.outside = 0  # bytes of optimizer state in ordinary host memory
        self._done, self._took = 0, 0.0  # parameters updated by the fast host kernel, and its seconds
        self._counts_there = {
            id(p): bool(g.get("fused") or g.get("capturable")) for g in optimizer.param_groups for p in g["params"]
        }
        self._scale: tuple[torch.Tensor, int, torch.Tensor] | None = None  # (the loop's factor, its version, device copy)
        self._parts: dict[str, Part] = {}
        self._pool: ThreadPoolExecutor | None = None
        if store is not None and self.is_plain_adam(snapshot(optimizer)):
            host_adam.backend()  # compile and choose the fast kernel now, not in the first step

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def take(self, unit: PlacedUnit) -> None:
        """Register a unit. The optimizer's groups are empty while a step runs, so what is needed of them is read now."""
        self._parts[unit.name] = Part(self.optimizer, [m.master for m in unit.trained])
        self._bring_states(unit)

    def part(self, unit: PlacedUnit) -> Part:
        return self._parts[unit.name]

    def part_of(self, unit: PlacedUnit) -> Part:
        """The same for a unit that may not be registered yet."""
        return self._parts.get(unit.name) or Part(self.optimizer, [m.master for m in unit.trained])

    def states(self, members: Sequence[Member]) -> list[dict[str, Any]]:
        return [self.optimizer.state.get(m.master) or {} for m in members]

    def keep(self, members: Sequence[Member], states: Sequence[dict[str, Any]], *, away: bool = False) -> None:
        for m, state in zip(members, states, strict=True):
            if state:
                self.optimizer.state[m.master] = state
            if away:
                there = [m.master, *(v for v in state.values() if isinstance(v, torch.Tensor))]
                self.away.update(t.untyped_storage()._cdata for t in there)

    def _bring_states(self, unit: PlacedUnit) -> None:
        """Move existing states to where their parameters are."""
        for m, state in zip(unit.trained, self.states(unit.trained), strict=True):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and self.follows(m, key, value):
                    state[key] = value.to(m.master.device)

    def return_states(self, unit: PlacedUnit) -> None:
        """Move states back to ordinary memory where their parameters came from, also those added later."""
        for m, state in zip(unit.members, self.states(unit.members), strict=True):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    to = m.came_from if self.follows(m, key, value) else value.device
                    in_files = unit.is_away and value.dim() > 0  # returned already
                    state[key] = value.to(to, copy=unit.update != DEVICE and not in_files)

    def follows(self, member: Member, key: str, value: torch.Tensor) -> bool:
        """Does a state live where its parameter does? Counters only where the update rule needs them there."""
        if value.dim() > 0 or key != "step":
            return True
        return self._counts_there.get(id(member.master), value.device.type != "cpu")

    # on the device

    def on_device(self, unit: PlacedUnit, order: Order, grads: Sequence[torch.Tensor]) -> None:
        members = [unit.trained[n] for n in order.which]
        states = self.states(members)
        narrow = [m.working.detach() for m in members] if unit.is_narrow and unit.is_here else None
        self.part(unit).update(
            [m.master.detach() for m in members],
            grads,
            states,
            order.groups,
            order.which,
            scale=self._on_this_device(order.scale),
            narrow=narrow,
            sliced=self.device.type == "cuda",
        )
        self.keep(members, states)

    def end_step(self) -> None:
        """Release the loop's tensors."""
        self._scale = None

    def _on_this_device(self, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Move a factor of all gradients to the device, once."""
        if scale is None:
            return None
        if self._scale is None or self._scale[0] is not scale or self._scale[1] != scale._version:
            self._scale = scale, scale._version, scale.to(self.device)
        return self._scale[2]

    # on the host

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run a job in the host's update thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                max_workers=1, thread_name_prefix="holdall-update", initializer=torch.set_num_threads, initargs=(self._threads,)
            )
        return self._pool.submit(late_job(job))

    def on_host(self, unit: PlacedUnit, order: Order, grads: Sequence[torch.Tensor]) -> Any:
        """Update on the host. Returns the event after which the device has the new weights (None: now, or they are fetched when
        needed).
        """
        assert self.lane is not None
        members = [unit.trained[n] for n in order.which]
        scale = order.scale.cpu() if order.scale is not None else None
        with self.quiet():
            states = self.states(members)
            before = _storages(states)
            every = unit.host_weights(self.lane)
            narrow = [every[n] for n in order.which] if every else None
            values = [m.master.detach() for m in members]
            if all(states) and self.is_plain_adam(order.groups, members):
                self.one_pass(unit, order, values, grads, states, scale, narrow)
            else:
                self.part(unit).update(values, grads, states, order.groups, order.which, scale=scale, narrow=narrow)
            if every and unit.returns_in_buffer:  # otherwise the buffer lacks weights of members without a gradient
                for n in set(range(len(unit.trained))).difference(order.which):
                    copy_tensor(every[n], unit.trained[n].master.data)
            after = _storages(states)
            self.away.difference_update(before.keys() - after.keys())  # freed: their addresses will be reused
            self.keep(members, states, away=before.keys() != after.keys())
        self.outside += sum(after.values()) - sum(before.values())
        return None if unit.is_streamed else self.refresh(unit, order)

    def is_plain_adam(self, groups: Groups, members: Sequence[Member] = ()) -> bool:
        """Does the fast host kernel do what the optimizer would: Adam or AdamW in float32 without extras?

        If the model computes on a CPU, bits must match torch's: then only for the fused optimizer.
        """
        if any(m.master.dtype != torch.float32 for m in members):
            return False
        if type(self.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        if any(g.get(extra) for g in groups for extra in ("amsgrad", "differentiable")):
            return False
        return self.device.type != "cpu" or all(g.get("fused") for g in groups)

    def one_pass(
        self,
        unit: PlacedUnit,
        order: Order,
        values: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        scale: torch.Tensor | None,
        narrow: Sequence[torch.Tensor] | None,
        *,
        steps: Sequence[torch.Tensor] | None = None,
        into: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None,
        peek: bool = False,
    ) -> None:
        """The whole update in one pass over host memory, group by group; `steps`, `into`: out of place.

        `peek`: only the new weights, into `narrow`.
        """
        began = time.perf_counter()
        for number, at in self.part(unit).by_group(order.which).items():
            group = order.groups[number]
            host_adam.update(
                [values[n].data for n in at],  # `.data` keeps the master's version: only the update writes here
                [states[n]["exp_avg"] for n in at],
                [states[n]["exp_avg_sq"] for n in at],
                [steps[n] if steps is not None else states[n]["step"] for n in at],
                [grads[n] for n in at],
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=type(self.optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
                maximize=bool(group["maximize"]),
                scale=1.0 if scale is None else float(scale),
                out=[narrow[n] for n in at] if narrow is not None else None,
                into=([into[n][0] for n in at], [into[n][1] for n in at], [into[n][2] for n in at])
                if into is not None
                else None,
                peek=peek,
                exact=self.device.type == "cpu",
                threads=self._threads,
            )
        if not peek:
            self._done += sum(value.numel() for value in values)
            self._took += time.perf_counter() - began

    @property
    def rate(self) -> float | None:
        """Measured parameters per second of host updates; None: not measured."""
        return self._done / self._took if self._took else None

    def refresh(self, unit: PlacedUnit, order: Order) -> Any:
        """Copy the new weights from the host to the device."""
        assert self.back is not None and unit.flat is not None
        if unit.is_narrow and len(unit.trained) == len(unit.members):
            assert unit.buffer is not None
            return self.back.pull(unit.buffer, unit.flat, after=order.after)
        if not unit.is_narrow and unit.source is not None:
            return self.back.pull(unit.source, unit.flat, after=order.after)
        new = unit.host_weights(self.back) or [m.master.data for m in unit.trained]  # frozen ones stay
        every = iter(new)
        for view, m in zip(unit.layout.views(unit.flat), unit.members, strict=True):
            if m.trained:
                copy_tensor(view, next(every))
        return None


def _storages(states: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Address -> bytes of the tensors in states."""
    return {v.untyped_storage()._cdata: v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor)}
