"""The drives of a run: updates of units on the host become those of processes that own their states.

Which they are is said by the action `near_storage`; a drive is `updates/drive.py`. Optimizer states are with the drives from
the first step on. The optimizer has a copy while its `state_dict` is made, and has them back when the harness is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.unit import PlacedUnit
from holdall.updates.drive import OPTIONS, Drive, LargestEntries

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_PIECE = 1 << 20  # elements
_NEAR: WeakKeyDictionary[Harness, Near] = WeakKeyDictionary()


def drives_of(harness: Harness) -> Sequence[Drive]:
    """The drives that serve a harness; none before its first step."""
    return _NEAR[harness].drives if harness in _NEAR else ()


class Near:
    """The drives of a run, and who is on which."""

    def __init__(self, harness: Harness, *, drives: int, folders: Sequence[str], share: float) -> None:
        self._harness = harness
        self._count = drives
        self._folders = folders or ("",)
        self._drives: list[Drive] = []
        self._threads: list[ThreadPoolExecutor] = []
        self._at: dict[int, tuple[str, int, torch.Tensor]] = {}  # id of a master -> key, drive, master
        self._seen: dict[str, int] = {}  # key -> digest of the values that the drive has
        self._largest = LargestEntries(share)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Until the harness is closed."""
        handles = [
            optimizer.register_step_pre_hook(lambda *_: self.take_over()),  # before the engine's, which is made later
            optimizer.register_state_dict_pre_hook(lambda *_: self.bring()),
            optimizer.register_state_dict_post_hook(lambda *_: self.leave()),
            optimizer.register_load_state_dict_post_hook(lambda *_: self.give()),
        ]
        for handle in handles:
            self._harness.on_close(handle.remove)
        self._harness.on_close(self.close)
        _NEAR[self._harness] = self

    @property
    def drives(self) -> Sequence[Drive]:
        return self._drives

    def take_over(self) -> None:
        """Before the first step: the drives begin, and updates on the host become theirs."""
        engine = self._harness.engine
        if engine is None or engine.updater is None or self._drives:
            return
        units = [u for u in engine.units if u.update == "host" and u.trained]
        self._check(units)
        for n in range(self._count if units else 0):
            self._drives.append(Drive(self._folders[n % len(self._folders)]))
            self._threads.append(ThreadPoolExecutor(1, thread_name_prefix="holdall-drive"))
        loads = [0] * len(self._drives)
        for unit in units:
            for m in unit.trained:
                drive = loads.index(min(loads))
                loads[drive] += m.master.numel()
                self._at[id(m.master)] = str(len(self._at)), drive, m.master
            engine.updater.part(unit).update = self._updating(unit)  # type: ignore[method-assign]
        self.give()

    def _check(self, units: Sequence[PlacedUnit]) -> None:
        optimizer = self._harness.optimizer
        plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        extras = plain and optimizer is not None and any(g.get("amsgrad") for g in optimizer.param_groups)
        if not plain or extras or any(m.master.dtype != torch.float32 for u in units for m in u.trained):
            raise Unsupported(
                "drives update float32 parameters by Adam or AdamW without `amsgrad`",
                hint='use torch.optim.AdamW, or another planner such as "zero_infinity"',
            )

    def _updating(self, unit: PlacedUnit) -> Any:
        masters = [m.master for m in unit.trained]

        def update(
            values: Sequence[torch.Tensor],
            grads: Sequence[torch.Tensor],
            states: Sequence[dict[str, Any]],  # noqa: ARG001 - they are with the drives
            groups: Sequence[dict[str, Any]],
            which: Sequence[int],
            *,
            scale: torch.Tensor | None = None,
            narrow: Sequence[torch.Tensor] | None = None,
            **_: Any,
        ) -> None:
            part = self._harness.engine.updater.part(unit)  # type: ignore[union-attr]
            numbers = {at: number for number, group in part.by_group(which).items() for at in group}
            found = []
            for at, (n, value, grad) in enumerate(zip(which, values, grads, strict=True)):
                wide = grad.to(value.dtype) if scale is None else grad.to(value.dtype) * scale
                found.append(self._send(masters[n], value, wide, groups[numbers[at]]))
            for at, (value, answer) in enumerate(zip(values, found, strict=True)):
                new = answer.result().view(value.shape)
                value.copy_(new)
                self._seen[self._at[id(masters[which[at]])][0]] = _digest(new)
                if narrow is not None:
                    narrow[at].copy_(new)

        return update

    def _send(self, master: torch.Tensor, value: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> Future[Any]:
        key, number, _ = self._at[id(master)]
        drive, thread = self._drives[number], self._threads[number]
        if self._seen.get(key) != _digest(value):  # the loop has written to it
            thread.submit(drive.set, key, value.detach().clone()).result()
        options = {name: group[name] for name in OPTIONS if name in group}
        options["lr"] = float(options["lr"])
        rule = type(self._harness.optimizer).__name__
        return thread.submit(drive.update, key, rule, options, self._largest.message(key, grad.detach().contiguous()))

    # states

    def bring(self) -> None:
        """The optimizer has a copy of all states."""
        optimizer = self._harness.optimizer
        assert optimizer is not None
        for key, number, master in self._at.values():
            if key in self._seen:
                step, first, second = self._threads[number].submit(self._drives[number].moments, key).result()
                if step:
                    moments = {"exp_avg": first.view(master.shape), "exp_avg_sq": second.view(master.shape)}
                    optimizer.state[master] = {"step": torch.tensor(step), **moments}

    def leave(self) -> None:
        """The optimizer has none: they are with the drives."""
        optimizer = self._harness.optimizer
        assert optimizer is not None
        for _, _, master in self._at.values():
            optimizer.state.pop(master, None)

    def give(self) -> None:
        """The drives take over the states that the optimizer has."""
        optimizer = self._harness.optimizer
        assert optimizer is not None
        for key, number, master in self._at.values():
            state = optimizer.state.pop(master, None) or {}
            if "exp_avg" in state:
                given = (float(state["step"]), *(state[k].detach().contiguous().cpu() for k in ("exp_avg", "exp_avg_sq")))
                self._threads[number].submit(self._drives[number].set_moments, key, *given).result()

    def close(self) -> None:
        try:
            self.bring()
        finally:
            for drive, thread in zip(self._drives, self._threads, strict=True):
                thread.shutdown(wait=True)
                drive.close()
            self._drives, self._threads, self._at = [], [], {}
            _NEAR.pop(self._harness, None)


def _digest(value: torch.Tensor) -> int:
    """Tells whether the loop has written to a master: the sum of its bits, each element times a random odd number."""
    bits = value.detach().contiguous().view(-1).view(torch.int32)
    found = 0
    for piece in bits.split(_PIECE):
        found = hash((found, int((piece.to(torch.int64) * _factors()[: len(piece)]).sum())))
    return found


@cache
def _factors() -> torch.Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randint(-(2**62), 2**62, (_PIECE,), generator=draws) * 2 + 1
